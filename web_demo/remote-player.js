/**
 * The server's voice where it comes on a media track: the browser plays it, the server paces it.
 */

const LOOK_EVERY_MS = 50;

export class RemotePlayer {
  /**
   * @param {AudioContext | null} context for the level; null where the page may have none
   * @param {(isPlaying: boolean, level: number) => void} onProgress level from 0 to 1
   */
  constructor(context, onProgress) {
    this.context = context;
    this.onProgress = onProgress;
    this.element = new Audio();
    this.element.autoplay = true;
    this.isPlaying = false;
    /** Milliseconds of sound so far. */
    this.playedMs = 0;
    this.loudest = 0;
    /** @type {MediaStreamAudioSourceNode | null} */
    this.source = null;
    this.analyser = context?.createAnalyser() ?? null;
    this.samples = new Float32Array(this.analyser?.fftSize ?? 0);
    this.timer = 0;
  }

  /** @param {MediaStream} stream */
  attach(stream) {
    this.element.srcObject = stream;
    // Refused only before the first gesture of the person; then there is nothing to be heard yet.
    this.element.play().catch(() => {});
    this.source?.disconnect();
    if (!this.context || !this.analyser) return;
    this.source = this.context.createMediaStreamSource(stream);
    this.source.connect(this.analyser);
    clearInterval(this.timer);
    this.timer = window.setInterval(() => this.look(), LOOK_EVERY_MS);
  }

  /** @param {import("./connection.js").RealtimeEvent} event of the server */
  handle(event) {
    if (event.type === "output_audio_buffer.started") {
      this.element.muted = false;
      this.setPlaying(true);
    } else if (
      event.type === "output_audio_buffer.stopped" ||
      event.type === "output_audio_buffer.cleared"
    ) {
      this.setPlaying(false);
    }
  }

  /** Falls silent at once; the server is told by whoever calls this. */
  silence() {
    this.element.muted = true;
    this.setPlaying(false);
  }

  /** @param {boolean} isPlaying */
  setPlaying(isPlaying) {
    this.isPlaying = isPlaying;
    this.onProgress(isPlaying, 0);
  }

  look() {
    if (!this.analyser || !this.isPlaying) return;
    this.analyser.getFloatTimeDomainData(this.samples);
    let peak = 0;
    for (const sample of this.samples) peak = Math.max(peak, Math.abs(sample));
    this.loudest = Math.max(this.loudest, peak);
    this.playedMs += LOOK_EVERY_MS;
    this.onProgress(true, peak);
  }

  /** Lets go of the sound. */
  close() {
    clearInterval(this.timer);
    this.source?.disconnect();
    this.element.srcObject = null;
    this.setPlaying(false);
  }
}
