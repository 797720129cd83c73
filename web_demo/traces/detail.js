/** One turn: what was said, its stages against their budget, and all else that is known of it. */

import { STAGES, byId, element, fillTable, ms, when } from "./dom.js";

const dialog = /** @type {HTMLDialogElement} */ (byId("detail"));

/** @type {string | null} of the recording on show */
let soundUrl = null;

/** @param {(turnId: string | null) => void} onChange which turn is shown now */
export function watchDetail(onChange) {
  dialog.addEventListener("close", () => {
    releaseSound();
    onChange(null);
  });
}

/** A recording can be many megabytes: it is let go as soon as it is not shown. */
function releaseSound() {
  dialog.querySelector("audio")?.pause();
  if (soundUrl) URL.revokeObjectURL(soundUrl);
  soundUrl = null;
}

/**
 * @param {Record<string, any>} turn
 * @param {string | null} recordingUrl
 */
export function showDetail(turn, recordingUrl) {
  releaseSound();
  soundUrl = recordingUrl;
  byId("detail-title").textContent = `${when(turn.ended_at_ms)} · ${outcome(turn)}`;
  const parts = [words("Caller", turn.transcript), wordTimes(turn.words ?? []), words("Parley", turn.reply)].flat();
  if (recordingUrl) parts.push(element("h3", "", "Recording: caller left, Parley right"), player(recordingUrl));
  parts.push(element("h3", "", heading(turn)), waterfall(turn));
  parts.push(...actions(turn.budget?.actions ?? []));
  parts.push(element("h3", "", "Details"), facts(turn));
  byId("detail-body").replaceChildren(...parts);
  if (!dialog.open) dialog.showModal();
}

/**
 * @param {string} url
 * @returns {HTMLElement}
 */
function player(url) {
  const made = /** @type {HTMLAudioElement} */ (element("audio", "player"));
  made.controls = true;
  made.src = url;
  made.setAttribute("aria-label", "Recording of the turn");
  return made;
}

/**
 * @param {Record<string, any>} turn
 * @returns {string}
 */
export function outcome(turn) {
  const name = String(turn.outcome).replace("_", " ");
  return turn.reason && turn.reason !== turn.outcome ? `${name} (${turn.reason})` : name;
}

/**
 * @param {string} who
 * @param {string} said
 * @returns {HTMLElement[]}
 */
function words(who, said) {
  return said ? [element("h3", "", who), element("p", "words", said)] : [];
}

/**
 * @param {{word: string, start_ms: number, end_ms: number}[]} said
 * @returns {HTMLElement[]}
 */
function wordTimes(said) {
  if (!said.length) return [];
  const table = element("table", "word-times");
  const rows = said.map(({ word, start_ms: start, end_ms: end }) => [word, ms(start), ms(end)]);
  fillTable(table, "When each word was said", ["Word", "From (ms)#", "To (ms)#"], rows);
  return [element("details", "", element("summary", "", "When each word was said"), table)];
}

/**
 * @param {Record<string, any>} turn
 * @returns {string}
 */
function heading(turn) {
  const target = turn.budget?.target_ms;
  const against = target ? ` against a budget of ${ms(target)} ms` : "";
  if (turn.voice_to_voice_ms !== null) return `${ms(turn.voice_to_voice_ms)} ms voice to voice${against}`;
  if (turn.time_to_first_audio_ms !== null) return `${ms(turn.time_to_first_audio_ms)} ms to the first sound`;
  return "No audible answer";
}

/**
 * @param {Record<string, any>} turn
 * @returns {HTMLElement}
 */
function waterfall(turn) {
  const stages = Object.entries(/** @type {Record<string, number>} */ (turn.stages_ms));
  if (!stages.length) return element("p", "quiet", "There are no stages to show.");
  const limits = turn.budget?.stages_ms ?? {};
  let start = 0;
  const ends = stages.map(([stage, spent]) => {
    const limitEnd = stage in limits ? start + limits[stage] : 0;
    start += spent;
    return Math.max(start, limitEnd);
  });
  const total = Math.max(...ends, 1);
  const longest = Math.max(...stages.map(([, spent]) => spent));
  start = 0;
  const rows = stages.map(([stage, spent]) => {
    const limit = stage in limits ? limits[stage] : null;
    const row = element("tr", spent === longest ? "is-longest" : "");
    if (limit !== null && spent > limit) row.classList.add("is-over");
    const head = element("th", "", STAGES.get(stage) ?? stage);
    head.setAttribute("scope", "row");
    const bar = element("span", "bar");
    // Through the object model: style attributes are forbidden by the content security policy.
    bar.style.setProperty("--start", String(start / total));
    bar.style.setProperty("--share", String(spent / total));
    const track = element("td", "track", bar);
    if (limit !== null) {
      const tick = element("span", "limit");
      tick.style.setProperty("--limit", String((start + limit) / total));
      track.append(tick, element("span", "visually-hidden", `budget ${ms(limit)} milliseconds`));
    }
    row.append(head, track, element("td", "ms", ms(spent)));
    start += spent;
    return row;
  });
  const table = element("table", "waterfall");
  const caption = element("caption", "visually-hidden", "Stages of the turn, milliseconds");
  table.append(caption, element("tbody", "", ...rows));
  return table;
}

/**
 * @param {{policy: string, stage: string, saved_ms: number | null}[]} taken
 * @returns {HTMLElement[]}
 */
function actions(taken) {
  if (!taken.length) return [];
  const lines = taken.map(({ policy, stage, saved_ms: saved }) => {
    const effect = saved === null || saved === undefined ? "" : `, ${ms(saved)} ms saved`;
    const because = STAGES.get(stage) ?? "the whole turn";
    return element("li", "", `${policy.replaceAll("_", " ")}, for ${because.toLowerCase()} was over budget${effect}`);
  });
  return [element("h3", "", "What was done about it"), element("ul", "", ...lines)];
}

/**
 * @param {Record<string, any>} turn
 * @returns {HTMLElement}
 */
function facts(turn) {
  const known = {
    turn: turn.turn_id,
    conversation: turn.session_id,
    ...turn.facts,
    ...Object.fromEntries(Object.entries(turn.client ?? {}).map(([name, value]) => [`client_${name}`, value])),
  };
  const lines = Object.entries(known).map(([name, value]) => {
    const shown = typeof value === "number" && !Number.isInteger(value) ? value.toFixed(1) : String(value ?? "–");
    return element("div", "", element("dt", "", name.replaceAll("_", " ")), element("dd", "", shown));
  });
  return element("dl", "facts", ...lines);
}
