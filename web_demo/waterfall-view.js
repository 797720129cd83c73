/**
 * Where the time of the last turn went: a table whose middle column is drawn as a waterfall.
 */

/** What each stage is to someone who waits for an answer. */
const TITLES = new Map([
  ["endpoint", "End of turn"],
  ["asr", "Transcription"],
  ["queue", "Queue"],
  ["prefill", "First token"],
  ["decode", "First clause"],
  ["tts", "Voice"],
  ["send", "Sending"],
]);

const SPOKEN_NOTE = "From your last word to the first sound";
const TYPED_NOTE = "From your message to the first sound";
const LIVE_NOTE = "Since the end of your turn, as it happens";
const SILENT_NOTE = "The last answer had no sound";

export class WaterfallView {
  /** @param {Document} page */
  constructor(page) {
    this.number = byId(page, "turn-number");
    this.unit = byId(page, "turn-unit");
    this.note = byId(page, "turn-note");
    this.facts = byId(page, "turn-facts");
    this.stages = byId(page, "stages");
    this.clear();
  }

  /** All stages without numbers, as long as there was no turn. */
  clear() {
    this.stages.replaceChildren(...[...TITLES].map(([, title]) => row(title, 0, null, 0, false)));
  }

  /**
   * The running turn, as far as the page can see it.
   *
   * @param {[string, number][]} marks stages and their milliseconds
   * @param {number} elapsed milliseconds since the person fell silent
   * @param {boolean} isOver nothing more will come of this turn but the server's record
   */
  live(marks, elapsed, isOver) {
    const longest = Math.max(...marks.map(([, ms]) => ms), 0);
    const known = new Map(marks);
    let start = 0;
    const rows = [...TITLES].map(([stage, title]) => {
      const ms = known.get(stage);
      const made = row(title, start, ms ?? null, elapsed, ms === longest && longest > 0);
      start += ms ?? 0;
      return made;
    });
    this.stages.replaceChildren(...rows);
    this.stages.classList.toggle("is-live", !isOver);
    this.number.textContent = marks.length ? wholeMs(elapsed) : "–";
    this.unit.hidden = !marks.length;
    this.note.textContent = LIVE_NOTE;
    this.facts.textContent = "";
  }

  /**
   * @param {{voice_to_voice_ms: number | null, stages_ms: Record<string, number>,
   *   facts?: Record<string, any>}} turn the `turn` of a `parley.turn.trace` event
   */
  show(turn) {
    this.stages.classList.remove("is-live");
    const stages = Object.entries(turn.stages_ms ?? {});
    const total = stages.reduce((sum, [, ms]) => sum + ms, 0);
    const longest = Math.max(...stages.map(([, ms]) => ms));
    let start = 0;
    const rows = stages.map(([stage, ms]) => {
      const made = row(TITLES.get(stage) ?? stage, start, ms, total, ms === longest && ms > 0);
      start += ms;
      return made;
    });
    if (rows.length) this.stages.replaceChildren(...rows);
    else this.clear();
    this.number.textContent = rows.length ? wholeMs(total) : "–";
    this.unit.hidden = !rows.length;
    const spoken = turn.voice_to_voice_ms !== null && turn.voice_to_voice_ms !== undefined;
    this.note.textContent = rows.length ? (spoken ? SPOKEN_NOTE : TYPED_NOTE) : SILENT_NOTE;
    this.facts.textContent = factsLine(turn.facts ?? {}, wasBegunEarly(turn.stages_ms ?? {}));
  }
}

/**
 * @param {number} ms
 * @returns {string}
 */
export function wholeMs(ms) {
  return Math.round(ms).toLocaleString("en");
}

/**
 * @param {string} title
 * @param {number} start milliseconds before this stage
 * @param {number | null} ms null: not known
 * @param {number} total
 * @param {boolean} isLongest
 * @returns {HTMLTableRowElement}
 */
function row(title, start, ms, total, isLongest) {
  const made = document.createElement("tr");
  made.classList.toggle("is-longest", isLongest);
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = title;
  const track = document.createElement("td");
  track.className = "track";
  if (ms !== null && total > 0) {
    const bar = document.createElement("span");
    bar.className = "bar";
    // Through the object model: style attributes are forbidden by the content security policy.
    bar.style.setProperty("--start", String(start / total));
    bar.style.setProperty("--share", String(ms / total));
    const share = document.createElement("span");
    share.className = "visually-hidden";
    share.textContent = `${Math.round((ms / total) * 100)} percent`;
    track.append(bar, share);
  }
  const number = document.createElement("td");
  number.className = "ms";
  number.textContent = ms === null ? "–" : wholeMs(ms);
  made.append(head, track, number);
  return made;
}

/**
 * All thinking was done while it was still uncertain that the caller had finished.
 *
 * @param {Record<string, number>} stages
 * @returns {boolean}
 */
function wasBegunEarly(stages) {
  const thinking = ["asr", "queue", "prefill", "decode"];
  return (stages.endpoint ?? 0) > 0 && thinking.every((stage) => !stages[stage]);
}

/**
 * @param {Record<string, any>} facts
 * @param {boolean} early
 * @returns {string}
 */
function factsLine(facts, early) {
  const { prompt_tokens: prompt, cached_tokens: cached, completion_tokens: answer } = facts;
  const parts = [];
  if (prompt) parts.push(`${prompt} prompt tokens${cached ? `, ${cached} of them cached` : ""}`);
  if (answer) parts.push(`${answer} answer tokens`);
  if (early) parts.push("0 ms: done before your turn was over");
  return parts.join(" · ");
}

/**
 * @param {Document} page
 * @param {string} id
 * @returns {HTMLElement}
 */
function byId(page, id) {
  const found = page.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}
