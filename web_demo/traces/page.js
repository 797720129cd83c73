/**
 * The traces page: reads the filter, asks the server, shows the answers.
 *
 * The filter and the turn on show are kept in the address behind the #, so that a view can be sent
 * to somebody else.
 */

import { ApiError, TracesApi } from "./api.js";
import { outcome, showDetail, watchDetail } from "./detail.js";
import { byId, element, fillTable, link, ms, tableRow, when } from "./dom.js";
import { showConversations, showSlowest, showStages, showSummary } from "./overview.js";
import { showTrend } from "./trend.js";

const PAGE = 50;
const UNITS_S = { h: 3600, d: 86_400 };
const TITLES = ["Ended", "Outcome", "ms#", "Where it went", "Said", "Conversation"];
const NUMBERS = TITLES.map((title) => title.endsWith("#"));

class TracesPage {
  constructor() {
    this.api = new TracesApi();
    /** @type {{filter: Record<string, string>, cursor: number | null}} what the list shows, and where it goes on */
    this.listed = { filter: {}, cursor: null };
    this.scaleMs = 1;
    /** @type {AbortController | null} */
    this.asking = null;
    this.filters = /** @type {HTMLFormElement} */ (byId("filters"));
    this.more = /** @type {HTMLButtonElement} */ (byId("more"));
  }

  async start() {
    this.filters.addEventListener("input", () => this.changed());
    this.filters.addEventListener("submit", (event) => event.preventDefault());
    byId("clear").addEventListener("click", () => {
      this.filters.reset();
      this.changed();
    });
    this.more.addEventListener("click", () => this.attempt(() => this.showMore()));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.api.apiKey = /** @type {HTMLInputElement} */ (byId("key")).value.trim();
      this.attempt(() => this.load());
    });
    watchDetail(() => this.writeAddress(null));
    // Somebody pastes another view's address into this page; our own changes are not announced.
    window.addEventListener("hashchange", () => void this.follow());
    await this.follow();
  }

  /** Shows what the address says. */
  async follow() {
    this.readAddress();
    await this.attempt(() => this.load());
    const turnId = new URLSearchParams(location.hash.slice(1)).get("turn");
    if (turnId) await this.attempt(() => this.open(turnId));
  }

  /** What the form says, as the server's parameters. */
  chosen() {
    const form = new FormData(this.filters);
    const period = String(form.get("period") ?? "");
    const seconds = period ? Number(period.slice(0, -1)) * UNITS_S[/** @type {"h" | "d"} */ (period.slice(-1))] : 0;
    const nowS = Date.now() / 1000;
    return {
      seconds,
      nowS,
      compares: form.has("compare") && seconds > 0,
      filter: {
        since: seconds ? (nowS - seconds).toFixed(3) : "",
        outcome: String(form.get("outcome") ?? ""),
        min_voice_to_voice_ms: String(form.get("min_ms") ?? ""),
        conversation: String(form.get("conversation") ?? "").trim(),
        over_budget: form.has("over_budget"),
        engine: String(form.get("engine") ?? ""),
      },
    };
  }

  changed() {
    this.writeAddress(null);
    this.attempt(() => this.load());
  }

  async load() {
    byId("main").setAttribute("aria-busy", "true");
    this.asking?.abort();
    this.asking = new AbortController();
    const { signal } = this.asking;
    const { seconds, nowS, compares, filter } = this.chosen();
    const comparison = compares
      ? { compare_since: (nowS - 2 * seconds).toFixed(3), compare_until: (nowS - seconds).toFixed(3) }
      : {};
    const [stats, conversations, turns] = await Promise.all([
      this.api.ask("/stats", { ...filter, ...comparison }, signal),
      this.api.ask("/conversations", { ...filter, limit: PAGE }, signal),
      this.api.ask("", { ...filter, limit: PAGE }, signal),
    ]);
    showSummary(stats.summary, stats.compared_with);
    showStages(stats.summary, stats.compared_with);
    showTrend(stats);
    showSlowest(stats.slowest, (turnId) => this.attempt(() => this.open(turnId)));
    showConversations(conversations.data, (sessionId) => this.choose(sessionId));
    this.scaleMs = Math.max(stats.summary.voice_to_voice_ms?.p99 ?? 1, 1);
    fillTable(byId("turns"), "Turns, the newest first", TITLES, turns.data.map(this.cells, this));
    this.remember(filter, turns);
    const number = stats.summary.turns.toLocaleString("en");
    byId("announcer").textContent = `${number} turns in ${stats.summary.conversations.toLocaleString("en")} conversations`;
    performance.mark("traces-shown");
    byId("main").setAttribute("aria-busy", "false");
  }

  async showMore() {
    const { listed } = this;
    const turns = await this.api.ask("", { ...listed.filter, limit: PAGE, cursor: listed.cursor });
    if (this.listed !== listed) return; // another view is shown by now, or another click has added these
    const rows = turns.data.map((/** @type {any} */ turn) => tableRow(this.cells(turn), NUMBERS));
    byId("turns").querySelector("tbody")?.append(...rows);
    // Keyboards go on where the new turns begin.
    rows[0]?.querySelector("button")?.focus();
    this.remember(listed.filter, turns);
  }

  /**
   * @param {Record<string, string>} filter
   * @param {{next_cursor: number | null}} turns
   */
  remember(filter, turns) {
    this.listed = { filter, cursor: turns.next_cursor };
    this.more.hidden = turns.next_cursor === null;
  }

  /** @param {string} sessionId */
  choose(sessionId) {
    const field = /** @type {HTMLInputElement} */ (this.filters.elements.namedItem("conversation"));
    field.value = sessionId;
    field.focus();
    this.changed();
  }

  /** @param {string} turnId */
  async open(turnId) {
    const turn = await this.api.ask(`/${encodeURIComponent(turnId)}`, {});
    showDetail(turn, turn.is_recorded ? await this.recordingOf(turnId) : null);
    this.writeAddress(turnId);
  }

  /**
   * @param {string} turnId
   * @returns {Promise<string | null>} null: it has been deleted since
   */
  async recordingOf(turnId) {
    try {
      return await this.api.recording(turnId);
    } catch (error) {
      if (error instanceof ApiError && error.reason === "refused") return null;
      throw error;
    }
  }

  /**
   * @param {Record<string, any>} turn
   * @returns {(Node | string)[]}
   */
  cells(turn) {
    const isBad = turn.outcome === "failed" || turn.outcome === "timed_out";
    const over = Object.keys(turn.budget?.misses_ms ?? {}).length > 0;
    const chars = turn.facts.reply_chars ?? turn.reply.length;
    const wait = element("span", over ? "is-strong is-bad" : "is-strong", ms(turn.voice_to_voice_ms));
    if (over) wait.append(element("span", "visually-hidden", " over budget"));
    return [
      link(when(turn.ended_at_ms), () => this.attempt(() => this.open(turn.turn_id))),
      element("span", isBad ? "is-bad" : "", outcome(turn)),
      wait,
      this.strip(turn.stages_ms),
      turn.transcript ? shortened(turn.transcript) : `${chars} characters answered`,
      link(turn.session_id, () => this.choose(turn.session_id)),
    ];
  }

  /**
   * @param {Record<string, number>} stages
   * @returns {HTMLElement}
   */
  strip(stages) {
    const made = element("div", "strip");
    const longest = Math.max(...Object.values(stages), 0);
    for (const spent of Object.values(stages)) {
      const part = element("span", spent === longest ? "is-longest" : "");
      part.style.setProperty("--share", String(Math.min(spent / this.scaleMs, 1)));
      made.append(part);
    }
    made.setAttribute("role", "img");
    const words = Object.entries(stages).map(([stage, spent]) => `${stage} ${ms(spent)}`);
    made.setAttribute("aria-label", words.join(", ") || "no audible answer");
    return made;
  }

  /**
   * Runs something that asks the server, and says what went wrong.
   *
   * @param {() => Promise<void>} action
   */
  async attempt(action) {
    try {
      await action();
      byId("problem").hidden = true;
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") return;
      byId("main").setAttribute("aria-busy", "false");
      if (!(error instanceof ApiError)) throw error;
      byId("problem-title").textContent = {
        key: this.api.apiKey ? "The server does not accept this key" : "This server asks for a key",
        refused: "The server refused",
        away: "The server is away",
      }[error.reason];
      byId("problem-text").textContent = error.message;
      byId("key-form").hidden = error.reason !== "key";
      byId("problem").hidden = false;
    }
  }

  readAddress() {
    const kept = new URLSearchParams(location.hash.slice(1));
    for (const field of this.filters.elements) {
      if (field instanceof HTMLInputElement && field.type === "checkbox") field.checked = kept.has(field.name);
      else if (field instanceof HTMLInputElement || field instanceof HTMLSelectElement) {
        field.value = kept.get(field.name) ?? "";
      }
    }
  }

  /** @param {string | null} turnId */
  writeAddress(turnId) {
    const kept = new URLSearchParams();
    for (const [name, value] of new FormData(this.filters)) if (value) kept.set(name, String(value));
    if (turnId) kept.set("turn", turnId);
    history.replaceState(null, "", `#${kept}`);
  }
}

/**
 * @param {string} said
 * @returns {string}
 */
function shortened(said) {
  return said.length > 48 ? `${said.slice(0, 47)}…` : said;
}

new TracesPage().start();
