/**
 * The loudspeaker: plays what arrives, knows what was heard, and falls silent at once.
 */

import { StreamResampler, WIRE_RATE, fromPcm16 } from "./pcm.js";

/**
 * What was cut off.
 *
 * @typedef {object} Cut
 * @property {string} item the item that was being played, "" when none was
 * @property {number} heardMs how much of it was heard
 */

export class Player {
  /**
   * @param {AudioContext} context
   * @param {(isPlaying: boolean, level: number) => void} onProgress level from 0 to 1
   * @returns {Promise<Player>}
   */
  static async open(context, onProgress) {
    await context.audioWorklet.addModule(new URL("playback-worklet.js", import.meta.url));
    return new Player(context, onProgress);
  }

  /**
   * @param {AudioContext} context
   * @param {(isPlaying: boolean, level: number) => void} onProgress
   */
  constructor(context, onProgress) {
    this.context = context;
    this.onProgress = onProgress;
    this.node = new AudioWorkletNode(context, "playback", {
      numberOfInputs: 0,
      outputChannelCount: [1],
    });
    this.node.connect(context.destination);
    this.node.port.onmessage = (message) => this.report(message.data);
    this.resampler = new StreamResampler(WIRE_RATE, context.sampleRate);
    this.item = "";
    /** Samples received of the current item, at the rate of the wire. */
    this.received = 0;
    this.isPlaying = false;
    this.totalPlayed = 0;
    this.loudest = 0;
    /** @type {((cut: Cut) => void)[]} */
    this.waiting = [];
  }

  /**
   * More of an item's audio.
   *
   * @param {string} item
   * @param {Int16Array} pcm
   */
  play(item, pcm) {
    if (item !== this.item) {
      this.item = item;
      this.received = 0;
      this.resampler.reset();
    }
    this.received += pcm.length;
    this.post(this.resampler.process(fromPcm16(pcm)));
  }

  /**
   * There is no more of this item: what the filter still holds is played.
   *
   * @param {string} item
   */
  finish(item) {
    if (item === this.item) this.post(this.resampler.flush());
  }

  /**
   * Falls silent at once.
   *
   * @returns {Promise<Cut>}
   */
  flush() {
    return new Promise((resolve) => {
      this.waiting.push(resolve);
      this.node.port.postMessage({ type: "flush" });
    });
  }

  /** @param {Float32Array} samples */
  post(samples) {
    if (!samples.length) return;
    // A copy: a view may share its buffer, and the buffer is given away.
    const own = samples.slice();
    this.node.port.postMessage({ type: "audio", item: this.item, samples: own }, [own.buffer]);
  }

  /** @param {any} message of the worklet */
  report(message) {
    if (message.type === "flushed") {
      this.isPlaying = false;
      const { item, played } = message;
      this.waiting.shift()?.({ item, heardMs: this.heardMs(item, played) });
      this.onProgress(false, 0);
      return;
    }
    this.totalPlayed = message.total;
    this.loudest = Math.max(this.loudest, message.peak);
    this.isPlaying = message.queued > 0;
    this.onProgress(this.isPlaying, this.isPlaying ? message.peak : 0);
  }

  /**
   * @param {string} item
   * @param {number} played samples that left the worklet
   * @returns {number} never more than was received
   */
  heardMs(item, played) {
    const known = item === this.item ? (this.received / WIRE_RATE) * 1000 : Infinity;
    // What has left the worklet is on its way through the sound system.
    const latency = this.context.outputLatency || this.context.baseLatency || 0;
    const heard = (played / this.context.sampleRate - latency) * 1000;
    return Math.floor(Math.max(0, Math.min(heard, known)));
  }
}
