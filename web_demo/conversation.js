/**
 * What the server's events mean for the conversation on the page, and what is sent in return.
 */

import { fromBase64 } from "./pcm.js";
import { wholeMs } from "./waterfall-view.js";

/** Of a failure that the person can do nothing about; what broke is told in the details. */
const ANSWER_LOST = "The answer was lost. Please ask again.";
/** Answers that can still be cut: those that are heard, and some that were. */
const MAX_SPOKEN = 8;
/** Failures, by code, for which there is better advice. */
const ADVICE = new Map([
  ["engine_busy", "Parley is busy. Please ask again in a moment."],
  ["context_length_exceeded", "This conversation has become too long. Please begin a new one."],
]);

/** @typedef {import("./connection.js").RealtimeEvent} RealtimeEvent */
/** @typedef {import("./transcript-view.js").Message} Message */

/**
 * @typedef {object} Answer
 * @property {string} id of the response
 * @property {Message} message
 * @property {boolean} isOver the server has ended it
 * @property {boolean} isCut the person interrupted it
 * @property {string} item the item of its words
 */

/**
 * What the conversation needs of the page.
 *
 * @typedef {object} Surroundings
 * @property {import("./transcript-view.js").TranscriptView} transcript
 * @property {(event: RealtimeEvent) => string} send
 * @property {() => import("./player.js").Player | null} player null: there is no sound, or the
 *   server plays it
 * @property {() => boolean} serverPlays the sound comes on a media track, paced by the server
 * @property {() => void} silence falls silent, where the server plays
 * @property {() => boolean} hasSound
 * @property {(turn: any) => void} onTrace
 * @property {(response: string, pcm: Int16Array) => void} onAudio
 * @property {(message: string) => void} onError
 * @property {(text: string) => void} onSilentAnswer an answer that can only be read
 * @property {() => void} onChange something about who speaks has changed
 */

export class Conversation {
  /** @param {Surroundings} surroundings */
  constructor(surroundings) {
    this.around = surroundings;
    /** @type {Map<string, Message>} what the person said, by item */
    this.heard = new Map();
    /** @type {Map<string, Answer>} by response */
    this.answers = new Map();
    /** @type {Map<string, Message>} what was said aloud, by item */
    this.spoken = new Map();
    /** @type {Set<string>} events of ours that may be late, and then fail without harm */
    this.harmless = new Set();
    /** @type {Answer | null} the latest, whose sound may go on when the server is done with it */
    this.latest = null;
    this.isCallerSpeaking = false;
    /** @type {{item: string, message: Message} | null} what the person said last */
    this.saidLast = null;
    /** @type {Set<string>} items of the person that are not answered yet */
    this.unanswered = new Set();
    /** @type {string[]} typed messages that wait for the running answer to end */
    this.typed = [];
    /** @type {Record<string, (event: RealtimeEvent) => void>} */
    this.handlers = {
      "input_audio_buffer.speech_started": (event) => this.speechStarted(event),
      "input_audio_buffer.speech_stopped": () => this.speechStopped(),
      "input_audio_buffer.committed": (event) => this.committed(event),
      "conversation.item.input_audio_transcription.delta": (event) =>
        this.message(event.item_id).append(event.delta),
      "conversation.item.input_audio_transcription.completed": (event) => this.transcribed(event),
      "conversation.item.input_audio_transcription.failed": (event) => this.notTranscribed(event),
      "response.created": (event) => this.answerBegins(event.response.id),
      "response.output_item.added": (event) => this.itemBegins(event),
      "output_audio_buffer.cleared": (event) => this.cleared(event.response_id),
      "conversation.item.truncated": (event) => this.truncated(event.item_id),
      "conversation.item.deleted": (event) => this.deleted(event.item_id),
      "conversation.item.retrieved": (event) => this.retrieved(event.item),
      "response.output_audio.delta": (event) => this.audio(event),
      "response.output_audio.done": (event) => this.audioEnds(event),
      "response.output_audio_transcript.delta": (event) => this.words(event),
      "response.output_text.delta": (event) => this.words(event),
      "response.done": (event) => this.answerEnds(event.response),
      "parley.turn.trace": (event) => this.trace(event.turn),
      error: (event) => this.failed(event.error),
    };
  }

  /** @param {RealtimeEvent} event of the server */
  handle(event) {
    this.handlers[event.type]?.(event);
    this.around.onChange();
  }

  /** @returns {boolean} an answer is due and nothing of it can be heard or read yet */
  get isThinking() {
    const running = this.runningAnswer();
    return running ? running.message.text === "" : this.unanswered.size > 0;
  }

  /** @returns {boolean} an answer is being made */
  get isAnswering() {
    return this.runningAnswer() !== undefined;
  }

  /**
   * Says something in writing; an answer that is running is stopped first.
   *
   * @param {string} text
   */
  async say(text) {
    this.typed.push(text);
    await this.stopAnswer();
    this.sendTyped();
    this.around.onChange();
  }

  /** Stops the answer: no more sound, and the server knows what was heard. */
  async stopAnswer() {
    if (this.around.serverPlays()) {
      this.around.silence();
      // It knows what it has played, and cancels what it is still making.
      this.sendHarmless({ type: "output_audio_buffer.clear" });
      return;
    }
    await this.cutSound();
    const running = this.runningAnswer();
    if (running) this.sendHarmless({ type: "response.cancel", response_id: running.id });
  }

  /** The person has spoken while holding a button, and let it go. */
  commit() {
    this.sendHarmless({ type: "input_audio_buffer.commit" });
    this.sendHarmless({ type: "response.create" });
  }

  /** The line is gone: nothing that is open will be finished. */
  lost() {
    void this.around.player()?.flush();
    for (const message of this.heard.values()) message.text ? message.finish() : message.remove();
    for (const answer of this.answers.values()) {
      if (!answer.isOver) this.close(answer, "interrupted");
    }
    this.heard.clear();
    this.answers.clear();
    this.spoken.clear();
    this.unanswered.clear();
    this.harmless.clear();
    this.typed = [];
    this.isCallerSpeaking = false;
    this.around.onChange();
  }

  /** @param {RealtimeEvent} event */
  speechStarted(event) {
    this.isCallerSpeaking = true;
    // Where the server plays, it is the one that decides whether this is an interruption.
    if (!this.around.serverPlays()) void this.cutSound();
    this.message(event.item_id);
  }

  speechStopped() {
    this.isCallerSpeaking = false;
  }

  /** @param {RealtimeEvent} event */
  committed(event) {
    this.isCallerSpeaking = false;
    this.message(event.item_id);
    this.unanswered.add(event.item_id);
  }

  /** @param {RealtimeEvent} event */
  transcribed(event) {
    const message = this.message(event.item_id);
    const text = event.transcript.trim();
    if (text) {
      message.set(text);
      message.finish();
      this.saidLast = { item: event.item_id, message };
    } else {
      message.remove();
      this.unanswered.delete(event.item_id);
    }
    this.heard.delete(event.item_id);
  }

  /** @param {RealtimeEvent} event */
  notTranscribed(event) {
    const message = this.message(event.item_id);
    message.problem("This was not understood. Please say it again.", event.error?.message);
    message.finish();
    this.heard.delete(event.item_id);
    this.unanswered.delete(event.item_id);
  }

  /** @param {string} id */
  answerBegins(id) {
    this.unanswered.clear();
    const message = this.around.transcript.add("parley");
    this.latest = { id, message, isOver: false, isCut: false, item: "" };
    this.answers.set(id, this.latest);
  }

  /** @param {RealtimeEvent} event */
  itemBegins(event) {
    const answer = this.answers.get(event.response_id);
    if (!answer || event.item.type !== "message") return;
    answer.item = event.item.id;
    this.spoken.set(event.item.id, answer.message);
    // Only what may still be cut.
    for (const item of this.spoken.keys()) {
      if (this.spoken.size <= MAX_SPOKEN) break;
      this.spoken.delete(item);
    }
  }

  /** @param {string} id of the response whose sound the server has stopped */
  cleared(id) {
    const answer = this.answers.get(id) ?? (this.latest?.id === id ? this.latest : null);
    if (answer) this.markCut(answer);
  }

  /** @param {string} item the conversation keeps less of it than was said: ask how much */
  truncated(item) {
    if (this.spoken.has(item)) {
      this.sendHarmless({ type: "conversation.item.retrieve", item_id: item });
    }
  }

  /** @param {string} item that is no more: the person goes on with what was taken for finished */
  deleted(item) {
    const saidLast = this.saidLast?.item === item ? this.saidLast.message : undefined;
    (this.heard.get(item) ?? this.spoken.get(item) ?? saidLast)?.remove();
    this.heard.delete(item);
    this.spoken.delete(item);
    this.unanswered.delete(item);
  }

  /** @param {any} item */
  retrieved(item) {
    const content = item.content?.[0] ?? {};
    this.spoken.get(item.id)?.cutTo(content.transcript ?? content.text ?? "");
  }

  /** @param {RealtimeEvent} event */
  audio(event) {
    const answer = this.answers.get(event.response_id);
    // What was on its way when the person spoke up is not played any more.
    if (!answer || answer.isCut) return;
    const pcm = fromBase64(event.delta);
    this.around.player()?.play(event.item_id, pcm);
    this.around.onAudio(event.response_id, pcm);
  }

  /** @param {RealtimeEvent} event */
  audioEnds(event) {
    // What the filter holds of a sound that was cut would be a click in the silence.
    if (this.answers.get(event.response_id)?.isCut) return;
    this.around.player()?.finish(event.item_id);
  }

  /** @param {RealtimeEvent} event */
  words(event) {
    const answer = this.answers.get(event.response_id);
    if (answer && !answer.isCut) answer.message.append(event.delta);
  }

  /** @param {any} response */
  answerEnds(response) {
    const answer = this.answers.get(response.id);
    if (answer) {
      const error = response.status_details?.error ?? {};
      const advice = ADVICE.get(error.code) ?? ANSWER_LOST;
      if (response.status === "failed") {
        answer.message.problem(advice, error.message);
        this.close(answer, "", true);
      } else if (response.status === "incomplete") this.close(answer, "cut short");
      else if (response.status === "cancelled") this.close(answer, "interrupted");
      else this.close(answer, "");
      const words = response.status === "failed" ? advice : answer.message.text;
      if (!this.around.hasSound()) this.around.onSilentAnswer(words);
    }
    this.sendTyped();
  }

  /** @param {any} turn */
  trace(turn) {
    const answer = this.answers.get(turn.response_id);
    if (answer && turn.voice_to_voice_ms !== null && turn.voice_to_voice_ms !== undefined) {
      const show = () => this.around.onTrace(turn);
      answer.message.tag(`${wholeMs(turn.voice_to_voice_ms)} ms`, show);
    }
    if (answer?.isOver) this.answers.delete(turn.response_id);
    this.around.onTrace(turn);
  }

  /** @param {any} error */
  failed(error) {
    if (!this.harmless.delete(error.event_id)) this.around.onError(error.message);
  }

  /**
   * @param {Answer} answer
   * @param {string} remark "" for none
   * @param {boolean} hasFailed then it is shown even without a word
   */
  close(answer, remark, hasFailed = false) {
    const isTagged = answer.isCut && answer.message.text !== "";
    answer.isOver = true;
    answer.message.finish();
    if (!answer.message.text && !hasFailed) answer.message.remove();
    else if (remark && !isTagged) answer.message.tag(remark);
  }

  /** Falls silent, and tells the server how much was heard. */
  async cutSound() {
    const running = this.runningAnswer();
    const player = this.around.player();
    if (running) this.markCut(running);
    if (!player) return;
    const cut = await player.flush();
    if (!cut.item) return;
    if (this.latest) this.markCut(this.latest);
    this.sendHarmless({
      type: "conversation.item.truncate",
      item_id: cut.item,
      content_index: 0,
      audio_end_ms: cut.heardMs,
    });
  }

  /** @param {Answer} answer */
  markCut(answer) {
    if (answer.isCut) return;
    answer.isCut = true;
    if (answer.message.text) answer.message.tag("interrupted");
  }

  /** @param {RealtimeEvent} event one that may come too late */
  sendHarmless(event) {
    this.harmless.add(this.around.send(event));
  }

  /** The next typed message, once nobody is answering. */
  sendTyped() {
    if (this.runningAnswer()) return;
    const text = this.typed.shift();
    if (text === undefined) return;
    const message = this.around.transcript.add("you");
    message.set(text);
    message.finish();
    this.unanswered.add("typed");
    const content = [{ type: "input_text", text }];
    const item = { type: "message", role: "user", content };
    this.around.send({ type: "conversation.item.create", item });
    this.around.send({ type: "response.create" });
  }

  /** @returns {Answer | undefined} */
  runningAnswer() {
    return [...this.answers.values()].find((answer) => !answer.isOver);
  }

  /**
   * The message of what the person said in this item, made when it is first heard of.
   *
   * @param {string} item
   * @returns {Message}
   */
  message(item) {
    const known = this.heard.get(item);
    if (known) return known;
    const made = this.around.transcript.add("you");
    this.heard.set(item, made);
    return made;
  }
}
