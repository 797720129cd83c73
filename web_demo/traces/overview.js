/** The figures above and beside the list: summary, stages, slowest turns, conversations. */

import { STAGES, byId, element, fillTable, link, ms, percent, when } from "./dom.js";

/**
 * @typedef {{turns: number, conversations: number, outcomes: Record<string, number>,
 *   over_budget: number, voice_to_voice_ms: Record<string, number> | null,
 *   stages_ms: Record<string, Record<string, number> | null>}} Summary
 */

/**
 * @param {Summary} summary
 * @param {Summary | null} before
 */
export function showSummary(summary, before) {
  const failed = (/** @type {Summary} */ of) => (of.outcomes.failed ?? 0) + (of.outcomes.timed_out ?? 0);
  const wait = (/** @type {Summary} */ of, /** @type {string} */ name) => of.voice_to_voice_ms?.[name];
  const figures = [
    figure("Turns", summary.turns.toLocaleString("en"), "", before && `${before.turns.toLocaleString("en")} before`),
    figure("Conversations", summary.conversations.toLocaleString("en"), "",
      before && `${before.conversations.toLocaleString("en")} before`),
    ...["p50", "p95", "p99"].map((name) =>
      figure(`Voice to voice, ${name}`, ms(wait(summary, name)), "ms",
        before && change(wait(summary, name), wait(before, name)))),
    figure("Failed", percent(failed(summary), summary.turns), "",
      before && `${percent(failed(before), before.turns)} before`),
    figure("Over budget", percent(summary.over_budget, summary.turns), "",
      before && `${percent(before.over_budget, before.turns)} before`),
  ];
  byId("figures").replaceChildren(...figures);
}

/**
 * @param {string} name
 * @param {string} value
 * @param {string} unit
 * @param {string | HTMLElement | null} note
 * @returns {HTMLElement}
 */
function figure(name, value, unit, note) {
  const shown = element("dd", "", value);
  if (unit) shown.append(" ", element("span", "unit", unit));
  if (note) shown.append(typeof note === "string" ? element("span", "change", note) : note);
  return element("div", "figure", element("dt", "", name), shown);
}

/**
 * @param {number | undefined} now
 * @param {number | undefined} then
 * @returns {HTMLElement}
 */
function change(now, then) {
  if (now === undefined || then === undefined) return element("span", "change", "nothing before");
  const difference = now - then;
  const words = Math.round(difference) === 0 ? "as before" : `${difference > 0 ? "+" : "−"}${ms(Math.abs(difference))} ms`;
  return element("span", difference > 0.05 * then ? "change is-worse" : "change", words);
}

/**
 * @param {Summary} summary
 * @param {Summary | null} before
 */
export function showStages(summary, before) {
  const rows = [...STAGES].map(([stage, name]) => {
    const now = summary.stages_ms[stage];
    const cells = [name, ms(now?.p50), ms(now?.p95), ms(now?.max)];
    if (!before) return cells;
    const then = before.stages_ms[stage];
    return [...cells, change(now?.p50, then?.p50), change(now?.p95, then?.p95)];
  });
  const titles = ["Milliseconds", "p50#", "p95#", "max#"];
  if (before) titles.push("p50 change#", "p95 change#");
  fillTable(byId("stages"), "What each stage took, milliseconds", titles, rows);
}

/**
 * @param {Record<string, any>[]} slowest
 * @param {(turnId: string) => void} open
 */
export function showSlowest(slowest, open) {
  const rows = slowest.map((turn) => [
    link(when(turn.ended_at_ms), () => open(turn.turn_id)),
    element("span", "is-strong", ms(turn.voice_to_voice_ms)),
    // Among few turns also those that nothing has slowed are of the slowest.
    turn.cause_above_median_ms >= 0.5 ? (STAGES.get(turn.cause) ?? turn.cause) : "–",
    turn.cause_above_median_ms >= 0.5 ? `+${ms(turn.cause_above_median_ms)}` : "",
  ]);
  const titles = ["Ended", "ms#", "Cause", "Above its median, ms#"];
  fillTable(byId("slowest"), "The slowest turns", titles, rows);
}

/**
 * @param {Record<string, any>[]} conversations
 * @param {(sessionId: string) => void} choose
 */
export function showConversations(conversations, choose) {
  const rows = conversations.map((one) => [
    link(when(one.last_ended_at_ms), () => choose(one.session_id)),
    String(one.turns),
    ms(one.mean_voice_to_voice_ms),
    ms(one.max_voice_to_voice_ms),
    one.failed ? element("span", "is-bad", String(one.failed)) : "0",
    one.session_id,
  ]);
  const titles = ["Last turn", "Turns#", "Mean ms#", "Max ms#", "Failed#", "Conversation"];
  fillTable(byId("conversations"), "Conversations, the latest first", titles, rows);
}
