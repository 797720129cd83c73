/**
 * The microphone: a track for WebRTC, and 20 ms of 24 kHz audio at a time for the WebSocket.
 */

import { StreamResampler, WIRE_RATE, loudness, toPcm16 } from "./pcm.js";

/** Why there is no microphone, in words for the person in front of it. */
export class MicrophoneError extends Error {
  /**
   * @param {string} title
   * @param {string} text
   */
  constructor(title, text) {
    super(text);
    this.title = title;
  }
}

const REASONS = new Map([
  [
    "NotAllowedError",
    [
      "The microphone is blocked",
      "Allow it for this page (the icon beside the address), then press the button again.",
    ],
  ],
  ["NotFoundError", ["There is no microphone", "Plug one in, then press the button again."]],
  [
    "NotReadableError",
    ["The microphone is busy", "Another program holds it. Close that, then try again."],
  ],
]);

export const INSECURE = new MicrophoneError(
  "This page may not use the microphone",
  "Browsers allow it only on https pages and on localhost. Open Parley through https, or on the " +
    "machine that runs it.",
);

export class Microphone {
  /**
   * Loads what `open` needs.
   *
   * @param {AudioContext} context
   */
  static async prepare(context) {
    await context.audioWorklet.addModule(new URL("capture-worklet.js", import.meta.url));
  }

  /**
   * Asks the person for the microphone. The context must be prepared.
   *
   * @param {AudioContext} context
   * @param {string} deviceId "" for the browser's choice
   * @param {(pcm: () => Int16Array, level: number) => void} onAudio level from 0 to 1; `pcm` makes
   *   the samples, in this moment and only once
   * @param {() => void} onLost the device went away
   * @returns {Promise<Microphone>}
   * @throws {MicrophoneError}
   */
  static async open(context, deviceId, onAudio, onLost) {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({
        audio: {
          // Not `exact`: a device that is gone must not keep the person from talking.
          ...(deviceId ? { deviceId: { ideal: deviceId } } : {}),
          channelCount: 1,
          // Without it, Parley would hear itself and interrupt itself.
          echoCancellation: true,
          noiseSuppression: true,
          autoGainControl: true,
        },
      });
    } catch (error) {
      throw explained(error);
    }
    return new Microphone(context, stream, onAudio, onLost);
  }

  /**
   * @param {AudioContext} context
   * @param {MediaStream} stream
   * @param {(pcm: () => Int16Array, level: number) => void} onAudio
   * @param {() => void} onLost
   */
  constructor(context, stream, onAudio, onLost) {
    this.stream = stream;
    this.source = context.createMediaStreamSource(stream);
    this.node = new AudioWorkletNode(context, "capture", { numberOfOutputs: 0 });
    const resampler = new StreamResampler(context.sampleRate, WIRE_RATE);
    this.node.port.onmessage = (message) => {
      onAudio(() => toPcm16(resampler.process(message.data)), loudness(message.data));
    };
    this.source.connect(this.node);
    for (const track of stream.getTracks()) track.addEventListener("ended", onLost);
  }

  /** @returns {MediaStreamTrack} */
  get track() {
    return this.stream.getAudioTracks()[0];
  }

  /**
   * Silence instead of the voice. The stream goes on, as the server's clock runs on it.
   *
   * @param {boolean} isMuted
   */
  mute(isMuted) {
    for (const track of this.stream.getTracks()) track.enabled = !isMuted;
  }

  /** Gives the device back. */
  close() {
    this.node.port.onmessage = null;
    this.source.disconnect();
    for (const track of this.stream.getTracks()) track.stop();
  }
}

/** @returns {boolean} whether this page can have a microphone and audio worklets at all */
export function canListen() {
  return window.isSecureContext && navigator.mediaDevices !== undefined;
}

/**
 * @param {unknown} error
 * @returns {MicrophoneError}
 */
function explained(error) {
  const name = error instanceof DOMException ? error.name : "";
  const [title, text] = REASONS.get(name) ?? ["The microphone cannot be used", String(error)];
  return new MicrophoneError(title, text);
}
