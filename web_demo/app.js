/**
 * The talk page: a button, a conversation, and where the time of the last turn went.
 */

import { Connection, ConnectionError } from "./connection.js";
import { Conversation } from "./conversation.js";
import { INSECURE, Microphone, MicrophoneError, canListen } from "./microphone.js";
import { NoticeView } from "./notice-view.js";
import { toBase64 } from "./pcm.js";
import { Player } from "./player.js";
import { TranscriptView } from "./transcript-view.js";
import { WaterfallView } from "./waterfall-view.js";

/** Seconds before each further attempt to reach the server. */
const RETRY_AFTER_S = [1, 2, 4, 8, 15];
const METER_EVERY_MS = 60;

class TalkPage {
  constructor() {
    /** @type {AudioContext | null} */
    this.context = null;
    /** @type {Player | null} */
    this.player = null;
    /** @type {Microphone | null} */
    this.microphone = null;
    /** @type {Connection | null} */
    this.connection = null;
    /** @type {Promise<void> | null} */
    this.connecting = null;
    this.apiKey = "";
    this.isMuted = false;
    this.numRetries = 0;
    this.numAttempts = 0;
    this.retryTimer = 0;
    this.isStarting = false;
    /** Typed while there was no line. @type {string[]} */
    this.unsent = [];
    this.meteredAt = 0;

    this.orb = find("orb");
    this.startButton = find("start");
    this.muteButton = find("mute");
    this.interruptButton = find("interrupt");
    this.messageBox = /** @type {HTMLInputElement} */ (find("message"));

    this.transcript = new TranscriptView(find("log"), find("empty"));
    this.waterfall = new WaterfallView(document);
    this.notice = new NoticeView(document, {
      onRetry: () => void this.connect(),
      onKey: (key) => {
        this.apiKey = key;
        void this.connect();
      },
      onClose: () => this.messageBox.focus(),
    });
    this.conversation = new Conversation({
      transcript: this.transcript,
      send: (event) => this.connection?.send(event) ?? "",
      player: () => this.player,
      onTrace: (turn) => this.waterfall.show(turn),
      onError: (message) => this.notice.show("The server could not do that", message),
      // Nobody hears it, so a screen reader should say it.
      onSilentAnswer: (text) => this.announce(text),
      onChange: () => this.showState(),
    });
    /** @type {Promise<AudioContext | null> | null} */
    this.audio = this.prepareAudio();
    // Reported when it is needed.
    this.audio.catch(() => {});
    this.listenToPage();
    this.showState();
  }

  listenToPage() {
    this.startButton.addEventListener("click", () => {
      if (this.microphone || this.retryTimer) this.stop();
      else void this.start();
    });
    this.muteButton.addEventListener("click", () => this.toggleMute());
    this.interruptButton.addEventListener("click", () => this.interrupt());
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.messageBox.value.trim();
      if (text) void this.type(text);
    });
    for (const idea of document.querySelectorAll(".idea")) {
      idea.addEventListener("click", () => void this.type(idea.textContent ?? ""));
    }
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.interrupt();
    });
    // The server ends a session whose audio stops; a page that comes back knows at once.
    window.addEventListener("pagehide", () => this.stop());
  }

  /** Microphone first: without it there is nothing to start. Typing works without. */
  async start() {
    if (this.isStarting) return;
    this.isStarting = true;
    this.notice.hide();
    this.setBusy("Asking for the microphone");
    try {
      const context = await this.openAudio();
      if (!context) throw INSECURE;
      this.microphone = await Microphone.open(
        context,
        (pcm, level) => this.heard(pcm, level),
        () => this.microphoneLost(),
      );
    } catch (error) {
      this.explainMicrophone(error);
      return;
    } finally {
      this.isStarting = false;
    }
    this.isMuted = false;
    await this.connect();
  }

  /** Ends the conversation and gives the microphone back. */
  stop() {
    this.cancelRetry();
    this.numAttempts += 1;
    this.unsent = [];
    this.releaseMicrophone();
    this.connection?.close();
    this.connection = null;
    this.conversation.lost();
    this.transcript.divide("Conversation ended");
    this.showState();
  }

  /** @param {string} text typed by the person */
  async type(text) {
    this.messageBox.value = "";
    this.unsent.push(text);
    try {
      await this.openAudio();
    } catch {
      // Then the answer is read, not heard.
    }
    await this.connect();
    this.sendUnsent();
  }

  sendUnsent() {
    if (!this.connection) return;
    for (const text of this.unsent.splice(0)) void this.conversation.say(text);
  }

  /**
   * Called with the page, so that nothing has to be loaded when the person presses a button.
   *
   * @returns {Promise<AudioContext | null>} null where the page may have no sound
   */
  async prepareAudio() {
    if (!canListen()) return null;
    const context = new AudioContext({ latencyHint: "interactive" });
    await Microphone.prepare(context);
    this.player = await Player.open(context, (isPlaying, level) => {
      this.orb.style.setProperty("--voice", level.toFixed(3));
      this.showState();
    });
    return context;
  }

  /**
   * Sound may begin only with a gesture of the person, so this is called from one.
   *
   * @returns {Promise<AudioContext | null>} null where the page may have no sound
   */
  async openAudio() {
    this.audio ??= this.prepareAudio();
    try {
      this.context = await this.audio;
    } catch (error) {
      this.audio = null; // next time anew
      throw error;
    }
    // Not awaited: a machine without a sound device may never answer.
    void this.context?.resume();
    return this.context;
  }

  /** Connects, or tells why not. Safe to call when there is a line, or an attempt to get one. */
  async connect() {
    if (this.connection) return;
    this.cancelRetry();
    this.connecting ??= this.tryToConnect().finally(() => {
      this.connecting = null;
      this.showState();
    });
    await this.connecting;
  }

  async tryToConnect() {
    const attempt = ++this.numAttempts;
    this.setBusy("Connecting");
    let connection;
    try {
      connection = await Connection.open(
        this.apiKey,
        (event) => this.conversation.handle(event),
        (error) => this.connectionLost(error),
      );
    } catch (error) {
      if (attempt === this.numAttempts) {
        this.explainConnection(/** @type {ConnectionError} */ (error));
      }
      return;
    }
    if (attempt !== this.numAttempts) {
      // The person has pressed stop meanwhile.
      connection.close();
      return;
    }
    this.connection = connection;
    this.numRetries = 0;
    this.notice.hide();
    const session = { type: "realtime", parley: { trace: true } };
    // Where there is no sound, there is no point in sending any.
    const modality = this.player ? {} : { output_modalities: ["text"] };
    this.connection.send({ type: "session.update", session: { ...session, ...modality } });
    this.announce(this.microphone ? "Connected. Parley is listening." : "Connected.");
    this.sendUnsent();
  }

  /** @param {ConnectionError} error */
  connectionLost(error) {
    this.connection = null;
    this.conversation.lost();
    this.transcript.divide("The line broke. Parley does not remember what was said before.");
    // Whoever only types gets a new line with the next message; nothing is lost by waiting for it.
    if (this.microphone) this.explainConnection(error);
    else this.notice.show("The conversation has ended", error.message || "The server hung up.");
    this.showState();
  }

  /** @param {ConnectionError} error */
  explainConnection(error) {
    this.showState();
    if (error.reason === "key") {
      this.notice.show(
        "This server asks for a key",
        error.message || "Enter the API key that its operator gave you.",
        { asksForKey: true },
      );
      return;
    }
    if (error.reason === "refused") {
      this.releaseMicrophone();
      this.notice.show("The server refused the conversation", error.message, { canRetry: true });
      return;
    }
    if (error.reason === "closed") this.retryLater("The line broke", error.message);
    else this.retryLater("The server is away", error.message || "Is it running?");
  }

  /**
   * @param {string} title
   * @param {string} text
   */
  retryLater(title, text) {
    const wait = RETRY_AFTER_S[Math.min(this.numRetries++, RETRY_AFTER_S.length - 1)];
    let left = wait;
    const countDown = () => this.notice.countDown(`Next attempt in ${left} s.`);
    this.notice.show(title, text, { canRetry: true });
    countDown();
    this.cancelRetry();
    this.retryTimer = window.setInterval(() => {
      left -= 1;
      if (left > 0) countDown();
      else void this.connect();
    }, 1000);
    this.showState();
  }

  cancelRetry() {
    clearInterval(this.retryTimer);
    this.retryTimer = 0;
  }

  /** @param {unknown} error */
  explainMicrophone(error) {
    this.releaseMicrophone();
    if (error instanceof MicrophoneError) {
      this.notice.show(error.title, `${error.message} You can also type.`);
    } else if (error instanceof DOMException && error.name === "AbortError") {
      this.notice.show(
        "The server is away",
        "A part of this page could not be loaded. Press the button to try again.",
      );
    } else {
      this.notice.show("The sound cannot be started", `${error} You can also type.`);
    }
    this.showState();
  }

  microphoneLost() {
    this.releaseMicrophone();
    this.notice.show("The microphone is gone", "Plug it in and press the button. You can also type.");
    this.showState();
  }

  releaseMicrophone() {
    this.microphone?.close();
    this.microphone = null;
    this.showLevel(0, true);
  }

  /**
   * @param {Int16Array} pcm 20 ms of the microphone
   * @param {number} level
   */
  heard(pcm, level) {
    this.connection?.sendAudio(toBase64(pcm));
    this.showLevel(this.isMuted ? 0 : level, false);
  }

  interrupt() {
    if (this.canInterrupt) void this.conversation.stopAnswer();
  }

  /** @returns {boolean} there is an answer to stop */
  get canInterrupt() {
    return Boolean(this.player?.isPlaying || this.conversation.isAnswering);
  }

  toggleMute() {
    if (!this.microphone) return;
    this.isMuted = !this.isMuted;
    this.microphone?.mute(this.isMuted);
    this.showState();
  }

  /**
   * @param {number} level from 0 to 1
   * @param {boolean} isNow false: not more often than the eye sees
   */
  showLevel(level, isNow) {
    const now = performance.now();
    if (!isNow && now - this.meteredAt < METER_EVERY_MS) return;
    this.meteredAt = now;
    this.orb.style.setProperty("--level", level.toFixed(3));
    find("meter-fill").style.setProperty("--level", level.toFixed(3));
    find("meter").setAttribute("aria-valuenow", String(Math.round(level * 100)));
  }

  /** Status, buttons and orb follow from who is speaking. */
  showState() {
    const [state, status, hint] = this.state();
    const isOn = this.microphone !== null || this.retryTimer !== 0;
    document.body.dataset.state = state;
    document.body.classList.toggle("is-on", isOn);
    setText(find("status"), status);
    setText(find("hint"), hint);
    setText(find("start-label"), isOn ? "Stop talking" : "Start talking");
    this.muteButton.setAttribute("aria-pressed", String(this.isMuted && isOn));
    // Not `disabled`: a button that has the focus must not lose it when the answer ends.
    this.muteButton.setAttribute("aria-disabled", String(this.microphone === null));
    this.interruptButton.setAttribute("aria-disabled", String(!this.canInterrupt));
  }

  /** @returns {[string, string, string]} name, status and hint */
  state() {
    if (this.connecting) return ["busy", "Connecting…", "One moment"];
    if (this.retryTimer) return ["away", "No connection", "Trying again"];
    if (!this.connection && this.microphone) return ["away", "No connection", "See the message"];
    if (!this.connection) return ["idle", "Ready", "Press the button and speak"];
    if (this.conversation.isCallerSpeaking) return ["hearing", "Hearing you", "Go on"];
    if (this.player?.isPlaying) return ["speaking", "Speaking", "Speak to interrupt"];
    if (this.conversation.isThinking) return ["thinking", "Thinking…", "One moment"];
    if (!this.microphone) return ["typing", "Connected", "Type, or press the button to speak"];
    if (this.isMuted) return ["muted", "Muted", "Parley hears nothing"];
    return ["listening", "Listening", "Say something"];
  }

  /** @param {string} text */
  setBusy(text) {
    document.body.dataset.state = "busy";
    setText(find("status"), `${text}…`);
    setText(find("hint"), "One moment");
  }

  /** @param {string} text for screen readers */
  announce(text) {
    find("announcer").textContent = text;
  }
}

/**
 * @param {HTMLElement} element
 * @param {string} text
 */
function setText(element, text) {
  // Unchanged text is left alone: assistive technology hears every write.
  if (element.textContent !== text) element.textContent = text;
}

/**
 * @param {string} id
 * @returns {HTMLElement}
 */
function find(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

export const page = new TalkPage();
