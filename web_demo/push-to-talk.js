/**
 * Speaking while a button (or the space bar) is held.
 */

/** The last packets are still on their way when the button is let go. */
const TAIL_MS = 200;
/** What a muted microphone sends meanwhile is thrown away before the server's buffer is full. */
const CLEAR_EVERY_MS = 60000;

export class PushToTalk {
  /**
   * @param {HTMLElement} button
   * @param {{begin: () => void, end: () => void, idle: () => void}} handlers
   */
  constructor(button, handlers) {
    this.button = button;
    this.handlers = handlers;
    this.isHeld = false;
    this.tail = 0;
    this.idling = 0;
    button.addEventListener("pointerdown", (event) => {
      button.setPointerCapture(event.pointerId);
      this.press();
    });
    for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) {
      button.addEventListener(kind, () => this.release());
    }
    document.addEventListener("keydown", (event) => this.key(event, true));
    document.addEventListener("keyup", (event) => this.key(event, false));
    window.addEventListener("blur", () => this.release());
  }

  /** @returns {boolean} */
  get isOn() {
    return !this.button.hidden;
  }

  /** @param {boolean} isOn */
  show(isOn) {
    if (this.isOn === isOn) return;
    if (!isOn) this.release();
    this.button.hidden = !isOn;
    clearInterval(this.idling);
    if (isOn) {
      this.idling = window.setInterval(() => {
        if (!this.isHeld && !this.tail) this.handlers.idle();
      }, CLEAR_EVERY_MS);
    }
  }

  /**
   * @param {KeyboardEvent} event
   * @param {boolean} isDown
   */
  key(event, isDown) {
    if (!this.isOn || event.code !== "Space") return;
    const target = event.target instanceof Element ? event.target : null;
    // Elsewhere the space bar has its own meaning: a letter, a click, a scroll.
    const isElsewhere = target?.closest("input, textarea, select, dialog, a, summary");
    const otherButton = target?.closest("button");
    if (isElsewhere || (otherButton && otherButton !== this.button)) return;
    event.preventDefault();
    if (event.repeat) return;
    if (isDown) this.press();
    else this.release();
  }

  press() {
    if (!this.isOn || this.isHeld) return;
    clearTimeout(this.tail);
    this.tail = 0;
    this.isHeld = true;
    this.button.setAttribute("aria-pressed", "true");
    this.handlers.begin();
  }

  release() {
    if (!this.isHeld) return;
    this.isHeld = false;
    this.button.setAttribute("aria-pressed", "false");
    this.tail = window.setTimeout(() => {
      this.tail = 0;
      this.handlers.end();
    }, TAIL_MS);
  }
}
