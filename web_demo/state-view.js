/**
 * Who is speaking, how loud, and what the buttons can do.
 */

import { find, setText } from "./page.js";

const METER_EVERY_MS = 60;
const LINES = new Map([
  ["webrtc", "over WebRTC"],
  ["websocket", "over a WebSocket"],
]);

/**
 * @typedef {object} State
 * @property {string} state
 * @property {string} status
 * @property {string} hint
 * @property {boolean} isOn
 * @property {boolean} isMuted
 * @property {boolean} canMute
 * @property {boolean} canInterrupt
 * @property {string} line "webrtc", "websocket", or "" for none
 */

export class StateView {
  constructor() {
    this.orb = find("orb");
    this.meteredAt = 0;
    this.voicedAt = 0;
  }

  /** @param {State} state */
  show({ state, status, hint, isOn, isMuted, canMute, canInterrupt, line }) {
    document.body.dataset.state = state;
    document.body.classList.toggle("is-on", isOn);
    setText(find("status"), status);
    setText(find("hint"), hint);
    setText(find("line"), LINES.get(line) ?? "");
    setText(find("start-label"), isOn ? "Stop talking" : "Start talking");
    find("mute").setAttribute("aria-pressed", String(isMuted && isOn));
    // Not `disabled`: a button that has the focus must not lose it when the answer ends.
    find("mute").setAttribute("aria-disabled", String(!canMute));
    find("interrupt").setAttribute("aria-disabled", String(!canInterrupt));
  }

  /** @param {string} text */
  busy(text) {
    document.body.dataset.state = "busy";
    setText(find("status"), `${text}…`);
    setText(find("hint"), "One moment");
  }

  /** @param {string} text for screen readers */
  announce(text) {
    find("announcer").textContent = text;
  }

  /**
   * @param {number} level from 0 to 1
   * @param {boolean} isNow false: not more often than the eye sees
   */
  microphoneLevel(level, isNow) {
    const now = performance.now();
    if (!isNow && now - this.meteredAt < METER_EVERY_MS) return;
    this.meteredAt = now;
    this.orb.style.setProperty("--level", level.toFixed(3));
    fill("meter", level);
  }

  /** @param {number} peak of the samples that are being played, from 0 to 1 */
  voiceLevel(peak) {
    const now = performance.now();
    if (peak && now - this.voicedAt < METER_EVERY_MS) return;
    this.voicedAt = now;
    this.orb.style.setProperty("--voice", peak.toFixed(3));
    // As the ear has it: -60 dB is nothing.
    fill("voice", Math.max(0, Math.min(1, (20 * Math.log10(peak + 1e-6) + 60) / 60)));
  }
}

/**
 * @param {string} id of a meter
 * @param {number} level from 0 to 1
 */
function fill(id, level) {
  find(`${id}-fill`).style.setProperty("--level", level.toFixed(3));
  find(id).setAttribute("aria-valuenow", String(Math.round(level * 100)));
}
