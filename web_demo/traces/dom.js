/** Small hands for building the page, and how figures are written on it. */

/** What each stage is to someone who waits for an answer. */
export const STAGES = new Map([
  ["endpoint", "End of turn"],
  ["asr", "Transcription"],
  ["queue", "Queue"],
  ["prefill", "First token"],
  ["decode", "First clause"],
  ["tts", "Voice"],
  ["send", "Sending"],
]);

/**
 * @param {string} tag
 * @param {string} [className]
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/**
 * @template {HTMLElement} T
 * @param {string} id
 * @returns {T}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return /** @type {T} */ (found);
}

/**
 * @param {string} label
 * @param {() => void} action
 * @returns {HTMLButtonElement}
 */
export function link(label, action) {
  const made = /** @type {HTMLButtonElement} */ (element("button", "link", label));
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

/**
 * Fills a table. Columns whose title ends in a "#" hold numbers.
 *
 * @param {HTMLElement} table
 * @param {string} caption for those who cannot see where the table stands
 * @param {string[]} titles
 * @param {(Node | string)[][]} rows the first cell of each is its head
 */
export function fillTable(table, caption, titles, rows) {
  const isNumber = titles.map((title) => title.endsWith("#"));
  const head = element("tr");
  titles.forEach((title, at) => {
    const cell = element("th", isNumber[at] ? "number" : "", title.replace(/#$/, ""));
    cell.setAttribute("scope", "col");
    head.append(cell);
  });
  const made = rows.map((cells) => tableRow(cells, isNumber));
  if (!made.length) {
    const cell = element("td", "empty-row", "Nothing here");
    cell.setAttribute("colspan", String(titles.length));
    made.push(element("tr", "", cell));
  }
  table.replaceChildren(
    element("caption", "visually-hidden", caption),
    element("thead", "", head),
    element("tbody", "", ...made),
  );
}

/**
 * @param {(Node | string)[]} cells
 * @param {boolean[]} isNumber
 * @returns {HTMLElement}
 */
export function tableRow(cells, isNumber) {
  const row = element("tr");
  cells.forEach((content, at) => {
    const cell = element(at ? "td" : "th", isNumber[at] ? "number" : "", content);
    if (!at) cell.setAttribute("scope", "row");
    row.append(cell);
  });
  return row;
}

/**
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function ms(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

/**
 * @param {number} part
 * @param {number} whole
 * @returns {string}
 */
export function percent(part, whole) {
  return whole ? `${((part / whole) * 100).toFixed(part / whole < 0.1 ? 1 : 0)}%` : "–";
}

const SHORT = new Intl.DateTimeFormat("en-GB", {
  month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
});
const TO_THE_MINUTE = new Intl.DateTimeFormat("en-GB", {
  month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit",
});

/**
 * @param {number} unixMs
 * @returns {string}
 */
export function when(unixMs) {
  return SHORT.format(unixMs);
}

/**
 * @param {number} unixMs
 * @returns {string}
 */
export function whenMinute(unixMs) {
  return TO_THE_MINUTE.format(unixMs);
}
