/** Percentiles over time: one inline SVG, and the same as a table. */

import { byId, element, fillTable, ms, whenMinute } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [560, 240];
const [LEFT, RIGHT, TOP, BOTTOM] = [44, 44, 12, 26];
const LINES = ["p99", "p95", "p50"];
/** Between the names of two lines that end close to each other. */
const NAME_GAP = 12;

/**
 * @typedef {{start_ms: number, turns: number, failed: number,
 *   voice_to_voice_ms: Record<string, number> | null}} Bucket
 */

/** @param {{buckets: Bucket[], bucket_s: number}} stats */
export function showTrend({ buckets, bucket_s: bucketS }) {
  const spoken = buckets.filter((bucket) => bucket.voice_to_voice_ms);
  byId("trend").replaceChildren(
    spoken.length ? chart(spoken, bucketS) : element("p", "quiet", "No spoken turns"),
  );
  const rows = buckets.map((bucket) => {
    const wait = bucket.voice_to_voice_ms;
    return [
      whenMinute(bucket.start_ms), String(bucket.turns), ms(wait?.p50), ms(wait?.p95), ms(wait?.p99),
      String(bucket.failed),
    ];
  });
  const titles = ["From", "Turns#", "p50#", "p95#", "p99#", "Failed#"];
  fillTable(byId("trend-table"), "Voice to voice over time, milliseconds", titles, rows);
}

/**
 * @param {Bucket[]} buckets all with spoken turns
 * @param {number} bucketS
 * @returns {SVGElement}
 */
function chart(buckets, bucketS) {
  const first = buckets[0].start_ms;
  const last = buckets[buckets.length - 1].start_ms;
  const top = niceTop(Math.max(...buckets.map((bucket) => wait(bucket, "p99"))));
  const span = Math.max(last - first, bucketS * 1000);
  const x = (/** @type {number} */ at) => LEFT + ((at - first) / span) * (WIDTH - LEFT - RIGHT);
  const y = (/** @type {number} */ value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);

  const drawing = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img" });
  const worst = buckets.reduce((a, b) => (wait(b, "p95") > wait(a, "p95") ? b : a));
  drawing.setAttribute(
    "aria-label",
    `Voice to voice, ${buckets.length} points from ${whenMinute(first)} to ${whenMinute(last)}. ` +
      `The highest p95 is ${ms(wait(worst, "p95"))} milliseconds, at ${whenMinute(worst.start_ms)}. ` +
      "The table below has all figures.",
  );
  for (let part = 0; part <= 4; part++) {
    const value = (top / 4) * part;
    drawing.append(
      shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      label(ms(value), LEFT - 6, y(value) + 4, "end"),
    );
  }
  drawing.append(label(whenMinute(first), LEFT, HEIGHT - 6, "start"));
  if (last > first) drawing.append(label(whenMinute(last), WIDTH - RIGHT, HEIGHT - 6, "end"));
  for (const name of LINES) drawLine(drawing, buckets, name, bucketS * 1000, x, y);
  drawNames(drawing, buckets[buckets.length - 1], y);
  for (const bucket of buckets.filter(({ failed }) => failed)) {
    const at = { class: "failed", x: x(bucket.start_ms) - 2, y: HEIGHT - BOTTOM - 4, width: 4, height: 4 };
    const mark = shape("rect", at);
    mark.append(title(`${whenMinute(bucket.start_ms)}: ${bucket.failed} failed`));
    drawing.append(mark);
  }
  return drawing;
}

/**
 * A line that is broken where nobody called.
 *
 * @param {SVGElement} drawing
 * @param {Bucket[]} buckets
 * @param {string} name
 * @param {number} bucketMs
 * @param {(at: number) => number} x
 * @param {(value: number) => number} y
 */
function drawLine(drawing, buckets, name, bucketMs, x, y) {
  let path = "";
  let before = -Infinity;
  for (const bucket of buckets) {
    const isNext = bucket.start_ms - before <= bucketMs;
    path += `${isNext ? "L" : "M"}${x(bucket.start_ms).toFixed(1)} ${y(wait(bucket, name)).toFixed(1)}`;
    before = bucket.start_ms;
    const dot = shape("circle", { class: name, cx: x(bucket.start_ms), cy: y(wait(bucket, name)), r: 2.2 });
    dot.append(title(`${whenMinute(bucket.start_ms)} ${name}: ${ms(wait(bucket, name))} ms, ${bucket.turns} turns`));
    drawing.append(dot);
  }
  drawing.append(shape("path", { class: `line ${name}`, d: path }));
}

/**
 * Each line's name beside its end; where ends meet, the names stay one above the other.
 *
 * @param {SVGElement} drawing
 * @param {Bucket} newest
 * @param {(value: number) => number} y
 */
function drawNames(drawing, newest, y) {
  // From the lowest line up; among equals that is the order of the percentiles.
  const ends = [...LINES].reverse().map((name) => ({ name, at: y(wait(newest, name)) + 4 }));
  ends.sort((one, other) => other.at - one.at);
  let below = Infinity;
  for (const { name, at } of ends) {
    below = Math.min(at, below - NAME_GAP);
    drawing.append(label(name, WIDTH - RIGHT + 8, below, "start"));
  }
}

/**
 * @param {Bucket} bucket
 * @param {string} name
 * @returns {number}
 */
function wait(bucket, name) {
  return bucket.voice_to_voice_ms?.[name] ?? 0;
}

/**
 * @param {number} value
 * @returns {number} a round number that is not below it
 */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return (/** @type {number} */ ([1, 2, 4, 6, 8, 10].find((step) => step * power >= value)) ?? 10) * power;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @returns {SVGElement}
 */
function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  return made;
}

/**
 * @param {string} words
 * @param {number} x
 * @param {number} y
 * @param {"start" | "end"} anchor
 * @returns {SVGElement}
 */
function label(words, x, y, anchor) {
  const made = shape("text", { x, y, "text-anchor": anchor });
  made.textContent = words;
  return made;
}

/**
 * @param {string} words
 * @returns {SVGElement}
 */
function title(words) {
  const made = shape("title", {});
  made.textContent = words;
  return made;
}
