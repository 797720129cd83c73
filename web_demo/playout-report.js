/**
 * What this page's loudspeaker made of an answer, for the trace of its turn: the server knows only
 * when it sent the sound.
 */

/** The server's threshold of what can be heard, -50 dB of full scale. */
const AUDIBLE = 0.003;

export class PlayoutReport {
  /**
   * @param {(turnId: string, report: Record<string, number>) => void} send
   * @param {() => number} [now] milliseconds
   */
  constructor(send, now = () => performance.now()) {
    this.send = send;
    this.now = now;
    /** Milliseconds of sound that the loudspeaker has played, of all answers. */
    this.played = 0;
    this.response = "";
    this.turnId = "";
    /** There is something to play, as far as is known. */
    this.hasSound = false;
    /** When the first audible sample came and sounded; -1: not yet. */
    this.receivedAt = -1;
    this.soundedAt = -1;
    /** Since when there is nothing to play; -1: there is. */
    this.silentSince = -1;
    this.gapMs = 0;
    this.numGaps = 0;
    /** Of all sound so far, when this answer's began. */
    this.playedBefore = 0;
  }

  /** @param {string} response the one that is played from now on */
  reset(response) {
    this.response = response;
    this.turnId = "";
    this.receivedAt = this.soundedAt = this.silentSince = -1;
    this.gapMs = this.numGaps = 0;
    this.playedBefore = this.played;
  }

  /**
   * More of an answer has come.
   *
   * @param {string} response
   * @param {Int16Array} pcm
   */
  received(response, pcm) {
    if (response !== this.response) this.reset(response);
    this.hasSound = true;
    if (this.receivedAt < 0 && pcm.some((sample) => Math.abs(sample) >= AUDIBLE * 32768)) {
      this.receivedAt = this.now();
    }
    if (this.silentSince >= 0) {
      this.numGaps += 1;
      this.gapMs += this.now() - this.silentSince;
      this.silentSince = -1;
    }
  }

  /**
   * The loudspeaker's word on how it goes.
   *
   * @param {boolean} isPlaying
   * @param {number} level the loudest sample since the last word, from 0 to 1
   * @param {number} playedMs of all answers
   * @param {number} latencyMs from here to the ear
   */
  progressed(isPlaying, level, playedMs, latencyMs) {
    this.played = playedMs;
    if (this.receivedAt >= 0 && this.soundedAt < 0 && level >= AUDIBLE) {
      this.soundedAt = this.now() + latencyMs;
    }
    if (!isPlaying && this.soundedAt >= 0 && this.silentSince < 0) this.silentSince = this.now();
    this.hasSound = isPlaying;
    this.sendIfOver();
  }

  /**
   * The server has told all of this turn; its sound may go on.
   *
   * @param {{turn_id: string, response_id: string}} turn
   */
  traced(turn) {
    if (turn.response_id !== this.response) return;
    this.turnId = turn.turn_id;
    this.sendIfOver();
  }

  sendIfOver() {
    if (this.hasSound || !this.turnId || this.soundedAt < 0) return;
    const report = {
      first_audio_delay_ms: this.soundedAt - this.receivedAt,
      gap_ms: this.gapMs,
      num_gaps: this.numGaps,
      played_ms: this.played - this.playedBefore,
    };
    const turnId = this.turnId;
    this.reset("");
    this.send(turnId, report);
  }
}

/**
 * @param {string} apiKey "" for none
 * @param {string} turnId
 * @param {Record<string, number>} report
 */
export async function sendReport(apiKey, turnId, report) {
  const url = new URL(`v1/traces/${encodeURIComponent(turnId)}/playout`, document.baseURI);
  /** @type {Record<string, string>} */
  const headers = { "Content-Type": "application/json" };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  try {
    const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify(report) });
    if (!answer.ok) console.info(`The playout report was answered with ${answer.status}.`);
  } catch (error) {
    // Nobody at the page has lost anything by it.
    console.info("The playout report was not sent.", error);
  }
}
