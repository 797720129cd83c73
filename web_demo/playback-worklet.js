/**
 * The loudspeaker's side of the audio thread: a queue that knows what has been played.
 *
 * In:  {type: "audio", item, samples}   more of an item's audio, at the context's rate
 *      {type: "flush"}                  fall silent at once
 * Out: {type: "progress", queued, peak, total}   every 20 ms while there is audio
 *      {type: "flushed", item, played}           the answer to a flush; item "" when none was cut
 * `played` counts samples of that item, `total` all samples ever played.
 */

/** A reply that is longer than this is cut: the queue must not eat the memory of a phone. */
const MAX_QUEUED_S = 600;
/** A sound that ends at once clicks; this is too short to be heard as speech. */
const FADE_S = 0.005;
const REPORT_EVERY_S = 0.02;

class PlaybackProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    /** @type {{item: string, samples: Float32Array}[]} */
    this.queue = [];
    this.offset = 0;
    this.queued = 0;
    this.item = "";
    this.played = 0;
    this.total = 0;
    this.peak = 0;
    this.sinceReport = 0;
    this.wasPlaying = false;
    /** @type {Float32Array} the last few samples, on their way to silence */
    this.fading = new Float32Array(0);
    this.port.onmessage = (message) => this.take(message.data);
  }

  /** @param {{type: string, item: string, samples: Float32Array}} message */
  take(message) {
    if (message.type === "flush") return this.flush();
    if (this.queued + message.samples.length > MAX_QUEUED_S * sampleRate) return;
    this.queue.push({ item: message.item, samples: message.samples });
    this.queued += message.samples.length;
  }

  flush() {
    const head = this.queue[0];
    const item = head ? head.item : "";
    // An item that was still waiting for its turn has not been heard at all.
    const played = item === this.item ? this.played : 0;
    this.fading = this.fadeOut();
    this.queue = [];
    this.offset = 0;
    this.queued = 0;
    this.port.postMessage({ type: "flushed", item, played });
  }

  /** @returns {Float32Array} */
  fadeOut() {
    const head = this.queue[0];
    if (!head) return new Float32Array(0);
    const faded = head.samples.slice(this.offset, this.offset + Math.round(FADE_S * sampleRate));
    for (let at = 0; at < faded.length; at++) faded[at] *= 1 - (at + 1) / faded.length;
    return faded;
  }

  /**
   * @param {Float32Array[][]} inputs unused
   * @param {Float32Array[][]} outputs one output, one channel
   * @returns {boolean} true: stay alive
   */
  process(inputs, outputs) {
    const out = outputs[0][0];
    const faded = this.fading.subarray(0, out.length);
    out.set(faded);
    this.fading = this.fading.subarray(faded.length);
    const numPlayed = this.fill(out, faded.length);
    this.sinceReport += out.length;
    const stopped = this.wasPlaying && numPlayed === 0;
    if ((numPlayed && this.sinceReport >= REPORT_EVERY_S * sampleRate) || stopped) this.report();
    this.wasPlaying = numPlayed > 0;
    return true;
  }

  /**
   * @param {Float32Array} out
   * @param {number} at where to begin
   * @returns {number} samples played
   */
  fill(out, at) {
    const began = at;
    while (at < out.length && this.queue.length) {
      const head = this.queue[0];
      if (head.item !== this.item) {
        this.item = head.item;
        this.played = 0;
      }
      const piece = head.samples.subarray(this.offset, this.offset + out.length - at);
      out.set(piece, at);
      for (const sample of piece) this.peak = Math.max(this.peak, Math.abs(sample));
      at += piece.length;
      this.offset += piece.length;
      this.played += piece.length;
      this.queued -= piece.length;
      if (this.offset === head.samples.length) {
        this.queue.shift();
        this.offset = 0;
      }
    }
    this.total += at - began;
    return at - began;
  }

  report() {
    const { queued, peak, total } = this;
    this.port.postMessage({ type: "progress", queued, peak, total });
    this.peak = 0;
    this.sinceReport = 0;
  }
}

registerProcessor("playback", PlaybackProcessor);
