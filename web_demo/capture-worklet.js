/**
 * The microphone's side of the audio thread: gathers 20 ms and hands them over.
 */

const CHUNK_S = 0.02;

class CaptureProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.chunk = new Float32Array(Math.round(sampleRate * CHUNK_S));
    this.filled = 0;
  }

  /**
   * @param {Float32Array[][]} inputs one input, any number of channels, 128 samples each
   * @returns {boolean} true: stay alive
   */
  process(inputs) {
    const channels = inputs[0];
    const length = channels[0]?.length ?? 128;
    for (let at = 0; at < length; at++) {
      let sum = 0;
      for (const channel of channels) sum += channel[at];
      // No channel at all: the device is gone or asleep. Silence keeps the clock running.
      this.chunk[this.filled++] = channels.length ? sum / channels.length : 0;
      if (this.filled === this.chunk.length) this.handOver();
    }
    return true;
  }

  handOver() {
    this.port.postMessage(this.chunk, [this.chunk.buffer]);
    this.chunk = new Float32Array(Math.round(sampleRate * CHUNK_S));
    this.filled = 0;
  }
}

registerProcessor("capture", CaptureProcessor);
