/**
 * The conversation on the page: one block a message, growing while it is said.
 */

/** @typedef {"you" | "parley"} Speaker */

const NAMES = { you: "You", parley: "Parley" };
/** Closer to the end than this, the reader wants to follow. */
const FOLLOW_PX = 80;
/** Older messages leave the page: an all-day conversation must not slow it down. */
const MAX_MESSAGES = 400;

export class TranscriptView {
  /**
   * @param {HTMLElement} log
   * @param {HTMLElement} empty shown while there is nothing else
   */
  constructor(log, empty) {
    this.log = log;
    this.empty = empty;
  }

  /**
   * A new message at the end.
   *
   * @param {Speaker} speaker
   * @returns {Message}
   */
  add(speaker) {
    return this.keepAtEnd(() => {
      this.empty.hidden = true;
      const message = new Message(speaker, (change) => this.keepAtEnd(change));
      this.log.append(message.element);
      while (this.log.childElementCount > MAX_MESSAGES + 1) this.empty.nextElementSibling?.remove();
      return message;
    });
  }

  /**
   * A line between messages.
   *
   * @param {string} text
   */
  divide(text) {
    if (!this.empty.hidden) return;
    this.keepAtEnd(() => this.log.append(element("p", "divider", text)));
  }

  /**
   * Makes a change, and stays at the end of the log if the reader was there.
   *
   * @template T
   * @param {() => T} change
   * @returns {T}
   */
  keepAtEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    const wasAtEnd = scrollHeight - scrollTop - clientHeight < FOLLOW_PX;
    const result = change();
    if (wasAtEnd) this.log.scrollTop = this.log.scrollHeight;
    return result;
  }
}

export class Message {
  /**
   * @param {Speaker} speaker
   * @param {(change: () => void) => void} changing runs a change of the page
   */
  constructor(speaker, changing) {
    this.changing = changing;
    this.text = "";
    this.element = element("article", `message message-${speaker} is-pending`);
    this.head = element("p", "message-head", NAMES[speaker]);
    this.words = element("p", "message-text");
    this.element.append(this.head, this.words);
  }

  /** @param {string} delta more of what is said */
  append(delta) {
    this.set(this.text + delta);
  }

  /** @param {string} text all that is said */
  set(text) {
    this.text = text;
    this.changing(() => {
      this.words.textContent = text.trim();
    });
  }

  /**
   * The person did not hear all of it: the rest stays to be read, and looks like it.
   *
   * @param {string} heard the beginning that was heard
   */
  cutTo(heard) {
    const said = this.text.trim();
    const kept = said.startsWith(heard.trim()) ? heard.trim() : "";
    const rest = said.slice(kept.length);
    if (!rest) return;
    this.changing(() => {
      const unheard = element("s", "unheard");
      unheard.append(element("span", "visually-hidden", " (not heard:) "), rest);
      this.words.replaceChildren(kept, unheard);
    });
  }

  /** Nothing will be added. */
  finish() {
    this.element.classList.remove("is-pending");
  }

  /**
   * A short remark beside the name.
   *
   * @param {string} text
   * @param {(() => void) | null} onClick null: there is nothing more to see
   */
  tag(text, onClick = null) {
    const tag = element(onClick ? "button" : "span", "tag", text);
    if (onClick) {
      tag.setAttribute("type", "button");
      tag.setAttribute("aria-label", `${text}: show where the time went`);
      tag.addEventListener("click", onClick);
    }
    this.changing(() => this.head.append(" ", tag));
  }

  /**
   * What went wrong, for a person; what the server calls it is folded away beneath.
   *
   * @param {string} text
   * @param {string} details "" for none
   */
  problem(text, details = "") {
    this.changing(() => {
      const box = element("div", "problem");
      box.append(element("p", "problem-text", text));
      if (details) {
        const fold = element("details", "problem-details");
        fold.append(element("summary", "", "Details"), element("p", "", details));
        box.append(fold);
      }
      this.element.append(box);
    });
  }

  /** Nothing was said after all. */
  remove() {
    this.element.remove();
  }
}

/**
 * @param {string} name
 * @param {string} className
 * @param {string} text
 * @returns {HTMLElement}
 */
function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}
