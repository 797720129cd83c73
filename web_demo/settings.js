/**
 * What the person has chosen: kept in the browser, shown in a dialog, told to the server.
 */

const KEY = "parley.settings";

/**
 * @typedef {object} Settings
 * @property {"auto" | "webrtc" | "websocket"} transport
 * @property {string} microphone a device id, "" for the browser's own choice
 * @property {"server" | "server_vad" | "semantic_vad" | "push"} turns "server": as the server is set
 * @property {"auto" | "low" | "medium" | "high"} eagerness of semantic_vad
 * @property {number} speed of the voice
 * @property {string} instructions "" for the server's own
 */

/** @type {Settings} */
const DEFAULTS = {
  transport: "auto",
  microphone: "",
  turns: "server",
  eagerness: "auto",
  speed: 1,
  instructions: "",
};

/** @returns {Settings} */
function loadSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEY) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

/**
 * The `session` of a `session.update`: only what differs from what the server has (`before`).
 *
 * @param {Settings} settings
 * @param {Settings} before
 * @param {Record<string, any> | null} own the session as the server began it
 * @returns {Record<string, any>}
 */
function sessionChanges(settings, before, own) {
  /** @type {Record<string, any>} */
  const session = {};
  /** @type {Record<string, any>} */
  const audio = {};
  if (settings.turns !== before.turns || settings.eagerness !== before.eagerness) {
    audio.input = { turn_detection: turnDetection(settings, own) };
  }
  if (settings.speed !== before.speed) audio.output = { speed: settings.speed };
  if (Object.keys(audio).length) session.audio = audio;
  if (settings.instructions !== before.instructions) {
    session.instructions = settings.instructions || own?.instructions;
  }
  return session;
}

/**
 * @param {Settings} settings
 * @param {Record<string, any> | null} own
 * @returns {Record<string, any> | null | undefined}
 */
function turnDetection({ turns, eagerness }, own) {
  if (turns === "server") return own?.audio.input.turn_detection;
  if (turns === "push") return null;
  if (turns === "semantic_vad") return { type: "semantic_vad", eagerness };
  return { type: "server_vad" };
}

export class SettingsView {
  /**
   * @param {Document} page
   * @param {(settings: Settings, before: Settings) => void} onChange
   */
  constructor(page, onChange) {
    const find = (/** @type {string} */ id) => page.getElementById(id);
    this.onChange = onChange;
    this.settings = loadSettings();
    /** @type {Record<string, any> | null} the session as the server began it */
    this.own = null;
    this.dialog = /** @type {HTMLDialogElement} */ (find("settings"));
    this.form = /** @type {HTMLFormElement} */ (find("settings-form"));
    this.devices = /** @type {HTMLSelectElement} */ (find("microphone"));
    this.eagerness = /** @type {HTMLElement} */ (find("eagerness-field"));
    this.speedShown = /** @type {HTMLOutputElement} */ (find("speed-shown"));
    find("open-settings")?.addEventListener("click", () => this.open());
    find("close-settings")?.addEventListener("click", () => this.dialog.close());
    find("reset-settings")?.addEventListener("click", () => this.apply({ ...DEFAULTS }));
    this.form.addEventListener("input", () => this.showDependent());
    // Not at every key: a half-written instruction is none.
    this.form.addEventListener("change", () => this.apply(this.read()));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.show();
  }

  /** @param {import("./connection.js").RealtimeEvent} event of the server */
  handle(event) {
    // A call that is taken up again goes on with what was changed.
    if (event.type === "session.created" && event.session.id !== this.own?.id) this.own = event.session;
  }

  /**
   * @param {Settings} before
   * @returns {Record<string, any>} what the server is to be told, as a `session`
   */
  changes(before = DEFAULTS) {
    return sessionChanges(this.settings, before, this.own);
  }

  open() {
    void this.listMicrophones();
    this.show();
    this.dialog.showModal();
  }

  /** @param {Settings} settings */
  apply(settings) {
    const before = this.settings;
    this.settings = settings;
    try {
      localStorage.setItem(KEY, JSON.stringify(settings));
    } catch {
      // A browser that keeps nothing: they last as long as the page.
    }
    this.show();
    this.onChange(settings, before);
  }

  /** Names are known only once the person has allowed a microphone. */
  async listMicrophones() {
    const devices = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
    const inputs = devices.filter(({ kind, deviceId }) => kind === "audioinput" && deviceId);
    const options = inputs
      .filter(({ deviceId }) => deviceId !== "default")
      .map(({ deviceId, label }, at) => new Option(label || `Microphone ${at + 1}`, deviceId));
    this.devices.replaceChildren(new Option("The browser's choice", ""), ...options);
    this.devices.value = this.settings.microphone;
    if (this.devices.selectedIndex < 0) this.devices.value = "";
  }

  /** @returns {Settings} */
  read() {
    const data = new FormData(this.form);
    const text = (/** @type {string} */ name) => String(data.get(name) ?? "");
    return {
      transport: /** @type {Settings["transport"]} */ (text("transport")),
      microphone: text("microphone"),
      turns: /** @type {Settings["turns"]} */ (text("turns")),
      eagerness: /** @type {Settings["eagerness"]} */ (text("eagerness")),
      speed: Number(text("speed")),
      instructions: text("instructions").trim(),
    };
  }

  show() {
    for (const [name, value] of Object.entries(this.settings)) {
      const field = this.form.elements.namedItem(name);
      if (field && "value" in field) field.value = String(value);
    }
    this.showDependent();
  }

  /** What the other fields make of no use is hidden; the speed is shown in words. */
  showDependent() {
    const { turns, speed } = this.read();
    this.eagerness.hidden = turns !== "semantic_vad";
    this.speedShown.textContent = `${speed.toFixed(2)} times`;
  }
}
