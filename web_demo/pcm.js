/**
 * Samples and their forms: float, 16-bit, base64, and other rates.
 */

/** Samples per second on the wire. */
export const WIRE_RATE = 24000;

/**
 * @param {Float32Array} samples in [-1, 1]; what is beyond is clipped
 * @returns {Int16Array}
 */
export function toPcm16(samples) {
  const pcm = new Int16Array(samples.length);
  for (let at = 0; at < samples.length; at++) {
    const scaled = Math.round(samples[at] * 32768);
    pcm[at] = Math.max(-32768, Math.min(32767, scaled));
  }
  return pcm;
}

/**
 * @param {Int16Array} pcm
 * @returns {Float32Array} in [-1, 1)
 */
export function fromPcm16(pcm) {
  const samples = new Float32Array(pcm.length);
  for (let at = 0; at < pcm.length; at++) samples[at] = pcm[at] / 32768;
  return samples;
}

/**
 * @param {Int16Array} pcm
 * @returns {string} base64 of little-endian 16-bit samples, as every browser's machine stores them
 */
export function toBase64(pcm) {
  const bytes = new Uint8Array(pcm.buffer, pcm.byteOffset, pcm.byteLength);
  let binary = "";
  // In pieces: the arguments of one call are limited.
  for (let at = 0; at < bytes.length; at += 8192) {
    binary += String.fromCharCode(...bytes.subarray(at, at + 8192));
  }
  return btoa(binary);
}

/**
 * @param {string} text base64; an odd last byte is left out
 * @returns {Int16Array}
 */
export function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length & ~1);
  for (let at = 0; at < bytes.length; at++) bytes[at] = binary.charCodeAt(at);
  return new Int16Array(bytes.buffer);
}

/**
 * @param {Float32Array} samples
 * @returns {number} loudness from 0 (silent, -60 dB) to 1 (full scale)
 */
export function loudness(samples) {
  let sum = 0;
  for (const sample of samples) sum += sample * sample;
  const db = 10 * Math.log10(sum / Math.max(samples.length, 1) + 1e-12);
  return Math.max(0, Math.min(1, (db + 60) / 60));
}

/** Zero crossings of the filter on each side: flat to 0.9 of the lower rate's Nyquist frequency. */
const HALF_WIDTH = 24;
const ROLL_OFF = 0.94;

/**
 * Changes the sample rate of one stream, chunk by chunk, without seams: a windowed-sinc filter with
 * one set of taps for each position that an output sample can have between input samples.
 */
export class StreamResampler {
  /**
   * @param {number} inRate
   * @param {number} outRate
   */
  constructor(inRate, outRate) {
    const divisor = gcd(inRate, outRate);
    this.up = outRate / divisor;
    this.down = inRate / divisor;
    const scale = Math.min(1, outRate / inRate) * ROLL_OFF;
    this.half = Math.ceil(HALF_WIDTH / scale);
    /** @type {Float32Array[]} */
    this.taps = [];
    for (let phase = 0; phase < this.up; phase++) {
      this.taps.push(sincTaps(phase / this.up, this.half, scale));
    }
    // As if silence had come before, so that the first sample out belongs to the first one in.
    /** @type {Float32Array} */
    this.history = new Float32Array(this.half);
    /** Which set of taps makes the next sample. @type {number} */
    this.phase = 0;
    /** Input still to come that the next sample does not need. @type {number} */
    this.skip = 0;
  }

  /** Forgets what is inside, ready for an unrelated stream. */
  reset() {
    this.history = new Float32Array(this.half);
    this.phase = 0;
    this.skip = 0;
  }

  /**
   * @param {Float32Array} samples
   * @returns {Float32Array} what can be made of it; half a filter's length stays inside
   */
  process(samples) {
    if (this.up === this.down) return samples;
    const input = new Float32Array(this.history.length + samples.length);
    input.set(this.history);
    input.set(samples, this.history.length);
    const taps = 2 * this.half + 1;
    const out = new Float32Array(Math.ceil((input.length * this.up) / this.down) + 1);
    let at = this.skip;
    let made = 0;
    while (at + taps <= input.length) {
      const filter = this.taps[this.phase];
      let sum = 0;
      for (let tap = 0; tap < taps; tap++) sum += input[at + tap] * filter[tap];
      out[made++] = sum;
      this.phase += this.down;
      at += Math.floor(this.phase / this.up);
      this.phase %= this.up;
    }
    const keepFrom = Math.min(at, input.length);
    this.history = input.slice(keepFrom);
    this.skip = at - keepFrom;
    return out.subarray(0, made);
  }

  /**
   * @returns {Float32Array} the rest; afterwards the converter is as new
   */
  flush() {
    const rest = this.process(new Float32Array(this.up === this.down ? 0 : this.half));
    this.reset();
    return rest;
  }
}

/**
 * @param {number} shift where the output sample lies between two input samples, in [0, 1)
 * @param {number} half taps on each side of the middle
 * @param {number} scale cut-off in units of the input's Nyquist frequency
 * @returns {Float32Array} Blackman-windowed, with a gain of 1
 */
function sincTaps(shift, half, scale) {
  const taps = new Float32Array(2 * half + 1);
  let sum = 0;
  for (let at = 0; at < taps.length; at++) {
    const x = at - half - shift;
    const angle = Math.PI * x * scale;
    const sinc = x === 0 ? 1 : Math.sin(angle) / angle;
    const turn = (2 * Math.PI * (x + half + 1)) / (2 * half + 2);
    taps[at] = sinc * (0.42 - 0.5 * Math.cos(turn) + 0.08 * Math.cos(2 * turn));
    sum += taps[at];
  }
  return taps.map((tap) => tap / sum);
}

/**
 * @param {number} a
 * @param {number} b
 * @returns {number}
 */
function gcd(a, b) {
  return b ? gcd(b, a % b) : a;
}
