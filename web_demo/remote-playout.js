/**
 * What this browser made of an answer that came on a media track, for the trace of its turn. The
 * browser plays such sound by itself; what it had to wait for and to invent is in its statistics.
 */

/**
 * @typedef {object} Counts sums since the beginning of the call, as in RTCInboundRtpStreamStats
 * @property {number} [jitterBufferDelay] seconds, over all samples that were played
 * @property {number} [jitterBufferEmittedCount]
 * @property {number} [concealedSamples] invented, because nothing came in time
 * @property {number} [silentConcealedSamples] of them, those that are silence
 * @property {number} [concealmentEvents]
 * @property {number} [totalSamplesReceived]
 * @property {number} [totalSamplesDuration] seconds
 */

export class RemotePlayout {
  /**
   * @param {() => Promise<Counts | null>} count
   * @param {(turnId: string, report: Record<string, number>) => void} send
   */
  constructor(count, send) {
    this.count = count;
    this.send = send;
    this.response = "";
    this.turnId = "";
    /** @type {Promise<Counts | null> | null} when the answer began to sound */
    this.before = null;
    /** @type {Promise<Counts | null> | null} when it was over */
    this.after = null;
  }

  /** @param {import("./connection.js").RealtimeEvent} event of the server */
  handle(event) {
    if (event.type === "output_audio_buffer.started") {
      this.response = event.response_id;
      this.turnId = "";
      this.before = this.count();
      this.after = null;
    } else if (event.response_id === this.response && /^output_audio_buffer\.(stopped|cleared)$/.test(event.type)) {
      this.after = this.count();
    } else if (event.type === "parley.turn.trace" && event.turn.response_id === this.response) {
      this.turnId = event.turn.turn_id;
    } else return;
    void this.sendIfOver();
  }

  async sendIfOver() {
    if (!this.before || !this.after || !this.turnId) return;
    const { before: begun, after: over, turnId } = this;
    this.before = this.after = null;
    const [before, after] = await Promise.all([begun, over]);
    const report = before && after ? reportOf(before, after) : null;
    if (report) this.send(turnId, report);
  }
}

/**
 * @param {Counts} before
 * @param {Counts} after
 * @returns {Record<string, number> | null} null: nothing was played
 */
function reportOf(before, after) {
  const grown = (/** @type {keyof Counts} */ name) => Math.max(0, (after[name] ?? 0) - (before[name] ?? 0));
  const samples = grown("totalSamplesReceived");
  const seconds = grown("totalSamplesDuration");
  const played = grown("jitterBufferEmittedCount");
  if (!samples || !seconds || !played) return null;
  // What is invented as silence is the pause in the sending, or a hole that is heard as one.
  const invented = Math.min(grown("concealedSamples"), samples);
  return {
    first_audio_delay_ms: (grown("jitterBufferDelay") / played) * 1000,
    gap_ms: (invented / samples) * seconds * 1000,
    num_gaps: grown("concealmentEvents"),
    played_ms: seconds * 1000,
  };
}
