/**
 * The talk page: a button, a conversation, and where the time of each turn went.
 */

import { Conversation } from "./conversation.js";
import { openLine } from "./line.js";
import { LiveTurn } from "./live-turn.js";
import { INSECURE, Microphone, MicrophoneError, canListen } from "./microphone.js";
import { NoticeView } from "./notice-view.js";
import { find } from "./page.js";
import { toBase64 } from "./pcm.js";
import { Player } from "./player.js";
import { PlayoutReport, sendReport } from "./playout-report.js";
import { PushToTalk } from "./push-to-talk.js";
import { RemotePlayer } from "./remote-player.js";
import { SettingsView } from "./settings.js";
import { StateView } from "./state-view.js";
import { TranscriptView } from "./transcript-view.js";
import { WaterfallView } from "./waterfall-view.js";

/** @typedef {import("./connection.js").ConnectionError} ConnectionError */

/** Seconds before each further attempt to reach the server. */
const RETRY_AFTER_S = [1, 2, 4, 8, 15];
const HOLD = "Hold the button to interrupt";
const SPEAK = "Speak to interrupt";

class TalkPage {
  constructor() {
    /** @type {AudioContext | null} */
    this.context = null;
    /** @type {Player | null} of audio that comes in messages */
    this.player = null;
    /** @type {RemotePlayer | null} of audio that comes on a track */
    this.remote = null;
    /** @type {Microphone | null} */
    this.microphone = null;
    /** @type {import("./line.js").Line | null} */
    this.connection = null;
    /** @type {Promise<void> | null} */
    this.connecting = null;
    this.apiKey = "";
    this.isMuted = false;
    this.isMending = false;
    this.numRetries = 0;
    this.numAttempts = 0;
    this.retryTimer = 0;
    this.isStarting = false;
    /** Typed while there was no line. @type {string[]} */
    this.unsent = [];

    this.messageBox = /** @type {HTMLInputElement} */ (find("message"));
    this.view = new StateView();
    this.transcript = new TranscriptView(find("log"), find("empty"));
    this.waterfall = new WaterfallView(document);
    this.turn = new LiveTurn((marks, ms, isOver) => this.waterfall.live(marks, ms, isOver));
    this.playout = new PlayoutReport((id, report) => void sendReport(this.apiKey, id, report));
    this.settings = new SettingsView(document, (now, before) => this.settingsChanged(now, before));
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
      player: () => (this.serverPlays ? null : this.player),
      serverPlays: () => this.serverPlays,
      silence: () => this.remote?.silence(),
      hasSound: () => this.player !== null,
      onTrace: (turn) => this.waterfall.show(turn),
      onAudio: (response, pcm) => this.playout.received(response, pcm),
      onError: (message) => this.notice.show("The server could not do that", message),
      // Nobody hears it, so a screen reader should say it.
      onSilentAnswer: (text) => this.view.announce(text),
      onChange: () => this.showState(),
    });
    this.push = new PushToTalk(find("push"), {
      begin: () => this.beginToSpeak(),
      end: () => this.endSpeaking(),
      idle: () => this.connection?.send({ type: "input_audio_buffer.clear" }),
    });
    /** @type {Promise<AudioContext | null> | null} */
    this.audio = this.prepareAudio();
    // Reported when it is needed.
    this.audio.catch(() => {});
    this.listenToPage();
    this.showState();
  }

  listenToPage() {
    find("start").addEventListener("click", () => {
      if (this.microphone || this.retryTimer) this.stop();
      else void this.start();
    });
    find("mute").addEventListener("click", () => this.toggleMute());
    find("interrupt").addEventListener("click", () => this.interrupt());
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.messageBox.value.trim();
      if (text) void this.type(text);
    });
    for (const idea of document.querySelectorAll(".idea")) {
      idea.addEventListener("click", () => void this.type(idea.textContent ?? ""));
    }
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !this.settings.dialog.open) this.interrupt();
    });
    // The server ends a session whose audio stops; a page that comes back knows at once.
    window.addEventListener("pagehide", () => this.stop());
  }

  /** @returns {boolean} the sound of the running line comes on a media track */
  get serverPlays() {
    return this.connection?.kind === "webrtc";
  }

  /** @returns {boolean} */
  get isPlaying() {
    return Boolean(this.serverPlays ? this.remote?.isPlaying : this.player?.isPlaying);
  }

  /** Microphone first: without it there is nothing to start. Typing works without. */
  async start() {
    if (this.isStarting) return;
    this.isStarting = true;
    this.notice.hide();
    this.view.busy("Asking for the microphone");
    try {
      const context = await this.openAudio();
      if (!context) throw INSECURE;
      await this.openMicrophone(context);
    } catch (error) {
      this.explainMicrophone(error);
      return;
    } finally {
      this.isStarting = false;
    }
    this.isMuted = false;
    this.muteAsNeeded();
    await this.connect();
    this.connection?.setTrack(this.microphone?.track ?? null);
  }

  /** @param {AudioContext} context */
  async openMicrophone(context) {
    const before = this.microphone;
    this.microphone = await Microphone.open(
      context,
      this.settings.settings.microphone,
      (pcm, level) => this.heard(pcm, level),
      () => this.microphoneLost(),
    );
    before?.close();
  }

  /** Ends the conversation and gives the microphone back. */
  stop() {
    this.cancelRetry();
    this.numAttempts += 1;
    this.unsent = [];
    this.releaseMicrophone();
    this.connection?.close();
    this.connection = null;
    this.isMending = false;
    this.remote?.close();
    this.turn.stop();
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
    for (const text of this.unsent.splice(0)) {
      void this.conversation.say(text);
      this.turn.begin();
    }
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
    const onProgress = (/** @type {boolean} */ isPlaying, /** @type {number} */ level) => {
      if (isPlaying) this.turn.sounded();
      this.view.voiceLevel(level);
      this.showState();
    };
    this.player = await Player.open(context, (isPlaying, level) => {
      onProgress(isPlaying, level);
      const latencyS = context.outputLatency || context.baseLatency || 0;
      const playedMs = ((this.player?.totalPlayed ?? 0) / context.sampleRate) * 1000;
      this.playout.progressed(isPlaying, level, playedMs, latencyS * 1000);
    });
    this.remote = new RemotePlayer(context, onProgress);
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
    this.view.busy("Connecting");
    let connection;
    try {
      connection = await openLine({
        // Where there is no sound, there is no point in a media track.
        transport: this.player ? this.settings.settings.transport : "websocket",
        apiKey: this.apiKey,
        track: this.microphone?.track ?? null,
        onEvent: (event) => this.take(event),
        onLost: (error) => this.connectionLost(error),
        onVoice: (stream) => this.remote?.attach(stream),
        onMending: (isMending, leftS) => this.mending(isMending, leftS),
      });
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
    const session = { type: "realtime", parley: { trace: true }, ...this.settings.changes() };
    const modality = this.player ? {} : { output_modalities: ["text"] };
    this.connection.send({ type: "session.update", session: { ...session, ...modality } });
    this.view.announce(this.microphone ? "Connected. Parley is listening." : "Connected.");
    this.sendUnsent();
  }

  /** @param {import("./connection.js").RealtimeEvent} event of the server */
  take(event) {
    this.remote?.handle(event);
    this.settings.handle(event);
    this.turn.handle(event);
    this.conversation.handle(event);
    if (event.type === "parley.turn.trace") this.playout.traced(event.turn);
  }

  /**
   * @param {boolean} isMending the line broke, and the call is taken up again
   * @param {number} leftS until that is given up
   */
  mending(isMending, leftS) {
    if (isMending && !this.isMending) this.notice.show("The line broke", "Taking the call up again…");
    if (isMending) this.notice.countDown(`For ${leftS} s more; then a new one begins.`);
    else {
      this.notice.hide();
      this.transcript.divide("The line broke and is mended. Parley remembers what was said.");
    }
    this.isMending = isMending;
    this.showState();
  }

  /** @param {ConnectionError} error */
  connectionLost(error) {
    this.connection = null;
    this.isMending = false;
    this.remote?.close();
    this.turn.stop();
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
    this.connection?.setTrack(null);
    this.microphone?.close();
    this.microphone = null;
    this.view.microphoneLevel(0, true);
  }

  /**
   * @param {() => Int16Array} pcm 20 ms of the microphone
   * @param {number} level
   */
  heard(pcm, level) {
    if (this.connection?.kind === "websocket") this.connection.sendAudio(toBase64(pcm()));
    const isHeard = this.push.isOn ? this.push.isHeld : !this.isMuted;
    this.view.microphoneLevel(isHeard ? level : 0, false);
  }

  interrupt() {
    if (this.canInterrupt) void this.conversation.stopAnswer();
  }

  /** @returns {boolean} there is an answer to stop */
  get canInterrupt() {
    return this.isPlaying || this.conversation.isAnswering;
  }

  toggleMute() {
    if (!this.microphone || this.push.isOn) return;
    this.isMuted = !this.isMuted;
    this.muteAsNeeded();
    this.showState();
  }

  muteAsNeeded() {
    this.microphone?.mute(this.push.isOn ? !this.push.isHeld : this.isMuted);
  }

  /** The button is held: whatever is being said gives way. */
  beginToSpeak() {
    this.interrupt();
    this.connection?.send({ type: "input_audio_buffer.clear" });
    this.muteAsNeeded();
    this.showState();
  }

  /** The button was let go, and what was on its way has gone. */
  endSpeaking() {
    this.muteAsNeeded();
    this.conversation.commit();
    this.showState();
  }

  /**
   * @param {import("./settings.js").Settings} now
   * @param {import("./settings.js").Settings} before
   */
  settingsChanged(now, before) {
    const session = this.settings.changes(before);
    if (Object.keys(session).length) {
      this.connection?.send({ type: "session.update", session: { type: "realtime", ...session } });
    }
    if (now.microphone !== before.microphone && this.microphone && this.context) {
      this.openMicrophone(this.context).then(
        () => {
          this.muteAsNeeded();
          this.connection?.setTrack(this.microphone?.track ?? null);
        },
        (error) => this.explainMicrophone(error),
      );
    }
    const needsLine = now.transport !== before.transport && this.connection;
    if (needsLine) this.view.announce("The new connection is used for the next conversation.");
    this.showState();
  }

  /** Status, buttons and orb follow from who is speaking. */
  showState() {
    this.push.show(this.settings.settings.turns === "push" && this.microphone !== null);
    this.muteAsNeeded();
    const [state, status, hint] = this.state();
    this.view.show({
      state,
      status,
      hint,
      isOn: this.microphone !== null || this.retryTimer !== 0,
      isMuted: this.isMuted,
      canMute: this.microphone !== null && !this.push.isOn,
      canInterrupt: this.canInterrupt,
      line: this.connection?.kind ?? "",
    });
  }

  /** @returns {[string, string, string]} name, status and hint */
  state() {
    if (this.connecting) return ["busy", "Connecting…", "One moment"];
    if (this.isMending) return ["busy", "The line broke", "Mending it…"];
    if (this.retryTimer) return ["away", "No connection", "Trying again"];
    if (!this.connection && this.microphone) return ["away", "No connection", "See the message"];
    if (!this.connection) return ["idle", "Ready", "Press the button and speak"];
    if (this.push.isHeld) return ["hearing", "Hearing you", "Let go when you have finished"];
    if (this.conversation.isCallerSpeaking) return ["hearing", "Hearing you", "Go on"];
    if (this.isPlaying) return ["speaking", "Speaking", this.push.isOn ? HOLD : SPEAK];
    if (this.conversation.isThinking) return ["thinking", "Thinking…", "One moment"];
    if (!this.microphone) return ["typing", "Connected", "Type, or press the button to speak"];
    if (this.push.isOn) return ["listening", "Waiting", "Hold the button or the space bar to speak"];
    if (this.isMuted) return ["muted", "Muted", "Parley hears nothing"];
    return ["listening", "Listening", "Say something"];
  }
}

export const page = new TalkPage();
