// The counters over time: one tile each, its newest value and its line.

import { beforeFrame, el, short } from "./dom.js";
import { Series } from "./series.js";

const SPANS = [300, 10800];
const SWEEP_SECONDS = 60;
const FRESH_SECONDS = 60;

// name, unit, value of (stats, rates, context); null: there is none. The last one stands
// out for a minute after it has grown.
const TILES = [
  ["Throughput", "tok/s", (_, rates) => rates.generation_tokens_total],
  ["Running", "", (stats) => stats.num_running_reqs],
  ["Queued", "", (stats) => stats.num_queue_reqs],
  ["Cache hit rate", "%", (stats, rates) => hitRate(stats, rates)],
  ["Accept length", "", (stats, _, { hello }) => hello.speculative_algorithm && stats.spec_accept_length],
  ["Tokens protected", "/s", (_, rates, { hello }) => checked(hello) && rates.kv_canary_protected_tokens_total],
  ["Sweep, last minute", "%", (_, __, { hello, swept }) => hello.kv_canary_sweep_interval ? swept : null],
  ["Heals", "", (stats, _, { hello }) => hello.kv_canary === "heal" ? sum(stats.kv_canary_heals_total) : null, true],
];
const RATES = [
  "generation_tokens_total", "prompt_tokens_total", "cached_tokens_total",
  "kv_canary_protected_tokens_total", "kv_canary_swept_tokens_total",
];
const WITHOUT = { "Accept length": "no drafts", "Sweep, last minute": "no sweep", Heals: "not healing" };

export class Counters {
  constructor(place, palette) {
    this.palette = palette;
    this.span = SPANS[0];
    this.before = null;
    this.swept = [];
    this.tiles = TILES.map(([name, unit, valueOf, marksGrowth = false]) => {
      const value = el("div", { class: "tile-value" });
      const canvas = el("canvas", { "aria-hidden": "true" });
      const tile = el("div", { class: "tile" }, el("div", { class: "tile-name", title: name }, name), value, canvas);
      place.append(tile);
      return { name, unit, valueOf, marksGrowth, grownAt: -Infinity, element: tile, value, canvas, series: new Series() };
    });
    place.title = "The last five minutes; click for three hours";
    place.addEventListener("click", () => {
      this.span = SPANS[(SPANS.indexOf(this.span) + 1) % SPANS.length];
      place.title = this.span === SPANS[0]
        ? "The last five minutes; click for three hours"
        : "The last three hours; click for five minutes";
      this.draw();
    });
  }

  /** Take the numbers of a snapshot. cachedTokens: in the prefix cache now. */
  update(stats, time, { hello, cachedTokens }) {
    const rates = this.#rates(stats, time);
    if (rates === null) return;
    const context = { hello, swept: this.#sweepShare(stats, time, cachedTokens) };
    for (const tile of this.tiles) {
      const value = tile.valueOf(stats, rates, context);
      const isThere = typeof value === "number" && Number.isFinite(value);
      if (isThere) tile.series.add(time, value);
      if (tile.marksGrowth && tile.isThere && value > tile.latest) tile.grownAt = time;
      tile.isThere = isThere;
      tile.latest = value;
    }
    this.time = time;
    this.draw();
  }

  setPalette(palette) {
    this.palette = palette;
    this.draw();
  }

  draw() {
    if (this.time !== undefined) beforeFrame(this, () => this.#drawNow());
  }

  #drawNow() {
    for (const tile of this.tiles) {
      const shown = tile.isThere ? short(tile.latest) : "–";
      const unit = tile.isThere ? tile.unit : WITHOUT[tile.name] ?? "canary off";
      if (tile.shown !== shown + unit) {
        tile.shown = shown + unit;
        tile.value.replaceChildren(shown, el("small", {}, unit));
      }
      tile.element.classList.toggle("fresh", tile.grownAt > this.time - FRESH_SECONDS);
      tile.series.draw(tile.canvas, this.palette, { now: this.time, span: this.span });
    }
  }

  /** Growth per second since the last snapshot; null where that is not known. */
  #rates(stats, time) {
    const before = this.before;
    this.before = { stats, time };
    const seconds = before === null ? 0 : time - before.time;
    // After a pause, or a restart of the server, there is no rate.
    if (seconds <= 0 || seconds > 10 || RATES.some((name) => stats[name] < before.stats[name])) return null;
    return Object.fromEntries(
      RATES.map((name) => [name, (stats[name] - before.stats[name]) / seconds]),
    );
  }

  #sweepShare(stats, time, cachedTokens) {
    this.swept.push([time, stats.kv_canary_swept_tokens_total]);
    while (this.swept[0][0] < time - SWEEP_SECONDS) this.swept.shift();
    if (!cachedTokens) return 100;
    return Math.min(100, (100 * (stats.kv_canary_swept_tokens_total - this.swept[0][1])) / cachedTokens);
  }
}

const checked = (hello) => (hello.kv_canary === "none" ? null : true);
const sum = (table) => Object.values(table).reduce((a, b) => a + b, 0);

/** Of the prompts since the last snapshot; without any, of all. */
function hitRate(stats, rates) {
  const prompt = rates.prompt_tokens_total;
  return prompt ? Math.min(100, (100 * rates.cached_tokens_total) / prompt) : 100 * stats.cache_hit_rate;
}

