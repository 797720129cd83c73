/**
 * The running turn on a clock of the page: what has happened since the person fell silent, and what
 * is being waited for. The server's own record replaces it when the turn is over.
 */

/** Stages as the page can see them, in order, and the events that end them. */
const ENDED_BY = new Map([
  ["conversation.item.input_audio_transcription.completed", "asr"],
  ["response.output_audio_transcript.delta", "decode"],
  ["response.output_text.delta", "decode"],
]);
const STAGES = ["asr", "decode", "send"];

export class LiveTurn {
  /** @param {(marks: [string, number][], elapsed: number, isOver: boolean) => void} onChange */
  constructor(onChange) {
    this.onChange = onChange;
    this.began = 0;
    /** @type {Map<string, number>} stage -> milliseconds from the beginning to its end */
    this.ends = new Map();
    this.frame = 0;
  }

  /** @param {import("./connection.js").RealtimeEvent} event of the server */
  handle(event) {
    if (event.type === "input_audio_buffer.committed") this.begin();
    else if (event.type === "parley.turn.trace") this.drop();
    else if (event.type === "input_audio_buffer.speech_started") this.stop();
    else if (event.type === "response.done" && event.response.status !== "completed") this.stop();
    const stage = ENDED_BY.get(event.type);
    if (stage) this.end(stage);
  }

  /** The person has finished, or has sent a message. */
  begin() {
    this.stop();
    this.began = performance.now();
    this.ends.clear();
    this.tick();
  }

  /** The first sound of the answer. */
  sounded() {
    this.end("send");
    if (this.frame) this.stop();
  }

  /** @param {string} stage */
  end(stage) {
    if (!this.frame || this.ends.has(stage)) return;
    this.ends.set(stage, performance.now() - this.began);
    this.report(false);
  }

  /** Nothing more will happen; what has is left to be seen. */
  stop() {
    if (!this.frame) return;
    this.drop();
    this.report(true);
  }

  /** There is something better to show. */
  drop() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
  }

  tick() {
    this.frame = requestAnimationFrame(() => this.tick());
    this.report(false);
  }

  /** @param {boolean} isOver */
  report(isOver) {
    const elapsed = performance.now() - this.began;
    /** @type {[string, number][]} */
    const marks = [];
    let start = 0;
    for (const stage of STAGES) {
      const end = this.ends.get(stage);
      if (end !== undefined) {
        marks.push([stage, Math.max(0, end - start)]);
        start = Math.max(start, end);
      } else {
        // The stage that is being waited for grows.
        if (!isOver) marks.push([stage, Math.max(0, elapsed - start)]);
        break;
      }
    }
    this.onChange(marks, isOver ? start : elapsed, isOver);
  }
}
