/**
 * The message above the conversation: what went wrong, in plain words, and what can be done.
 */

export class NoticeView {
  /**
   * @param {Document} page
   * @param {{onRetry: () => void, onKey: (key: string) => void, onClose: () => void}} handlers
   */
  constructor(page, handlers) {
    const find = (/** @type {string} */ id) => /** @type {HTMLElement} */ (page.getElementById(id));
    this.box = find("notice");
    this.title = find("notice-title");
    this.text = find("notice-text");
    this.countdown = find("notice-countdown");
    this.retry = find("retry");
    this.form = /** @type {HTMLFormElement} */ (find("key-form"));
    this.key = /** @type {HTMLInputElement} */ (find("key"));
    this.retry.addEventListener("click", () => handlers.onRetry());
    find("dismiss").addEventListener("click", () => {
      this.hide();
      handlers.onClose();
    });
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      handlers.onKey(this.key.value.trim());
      this.key.value = "";
    });
  }

  /**
   * @param {string} title
   * @param {string} text
   * @param {{canRetry?: boolean, asksForKey?: boolean}} options
   */
  show(title, text, { canRetry = false, asksForKey = false } = {}) {
    this.title.textContent = title;
    this.text.textContent = text;
    this.countdown.textContent = "";
    this.retry.hidden = !canRetry;
    this.form.hidden = !asksForKey;
    this.box.hidden = false;
    if (asksForKey) this.key.focus();
  }

  /**
   * A line that changes every second. It lies outside the alert: nobody wants to hear each one.
   *
   * @param {string} text
   */
  countDown(text) {
    this.countdown.textContent = text;
  }

  hide() {
    this.box.hidden = true;
  }
}
