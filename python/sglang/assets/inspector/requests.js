// The table of requests: progress, pages, shared prefixes, accept lengths.

import { beforeFrame, byId, el, fitCanvas, plural, count, setText } from "./dom.js";

const MAX_ROWS = 100;
const STRIP = 50;

/** Rows are kept from snapshot to snapshot, so that focus and strips stay. */
export class RequestTable {
  constructor(palette, { onFollow }) {
    this.palette = palette;
    this.onFollow = onFollow;
    this.body = byId("requests").tBodies[0];
    this.rows = new Map();
    this.followed = 0;
  }

  /** Take the requests of a snapshot. runs: the prefix tree; pages: by holder. */
  update(requests, total, { runs, pages }) {
    const shown = requests.slice(0, MAX_ROWS);
    const shared = sharedPrefixes(requests, runs);
    const alive = new Set(shown.map((request) => request.serial));
    for (const [serial, row] of this.rows) {
      if (alive.has(serial)) continue;
      row.element.remove();
      this.rows.delete(serial);
    }
    shown.forEach((request, place) => {
      const row = this.rows.get(request.serial) ?? this.#add(request);
      if (this.body.rows[place] !== row.element) {
        this.body.insertBefore(row.element, this.body.rows[place] ?? null);
      }
      this.#fill(row, request, shared.get(request.serial), pages.get(request.serial) ?? 0);
    });
    setText(byId("requests-count"), describe(requests, total));
    const rest = byId("requests-rest");
    rest.hidden = total <= shown.length;
    setText(rest, `and ${plural(total - shown.length, "more request")}`);
  }

  mark(serial) {
    this.followed = serial;
    for (const [key, row] of this.rows) row.element.classList.toggle("followed", key === serial);
    byId("unfollow").hidden = serial === 0;
  }

  setPalette(palette) {
    this.palette = palette;
  }

  #add(request) {
    const follow = el("button", { class: "link mono", type: "button" }, request.rid);
    follow.addEventListener("click", () => this.onFollow(request.serial));
    const [sharedBar, ownBar] = [el("i", { class: "shared" }), el("i", { class: "own" })];
    const bar = el("span", { class: "bar", "aria-hidden": "true" }, sharedBar, ownBar);
    const cells = { phase: el("td"), tokens: el("span"), pages: el("td", { class: "number" }), shared: el("td"), heals: el("span", { class: "healed" }) };
    const strip = el("canvas", { "aria-hidden": "true" });
    const mean = el("span", { class: "mean" });
    const element = el("tr", {},
      el("td", {}, follow), cells.phase, el("td", {}, bar, cells.tokens), cells.pages,
      cells.shared, el("td", {}, mean, strip), el("td", { class: "number" }, cells.heals));
    element.classList.toggle("followed", request.serial === this.followed);
    const row = { element, cells, sharedBar, ownBar, strip, mean, lengths: [], before: request };
    this.rows.set(request.serial, row);
    return row;
  }

  #fill(row, request, shared, pages) {
    const { cells } = row;
    setText(cells.phase, request.phase);
    const length = request.prompt_len + request.output_len;
    setText(cells.tokens, `${count(request.prompt_len)} + ${count(request.output_len)} of ${count(request.max_total_len)}`);
    row.sharedBar.style.width = `${(100 * request.cached_len) / request.max_total_len}%`;
    row.ownBar.style.width = `${(100 * Math.max(length - request.cached_len, 0)) / request.max_total_len}%`;
    setText(cells.pages, request.phase === "waiting" ? "" : count(pages));
    setText(cells.shared, describeShared(request, shared));
    setText(cells.heals, count(request.num_heals));
    cells.heals.hidden = !request.num_heals;
    this.#accept(row, request);
  }

  /** The mean accept length since the last snapshot, one column of the strip each. */
  #accept(row, request) {
    const steps = request.verify_ct - row.before.verify_ct;
    if (steps > 0) {
      row.lengths.push((request.accept_tokens - row.before.accept_tokens) / steps);
      if (row.lengths.length > STRIP) row.lengths.shift();
    }
    row.before = request;
    if (!request.verify_ct) return;
    setText(row.mean, (request.accept_tokens / request.verify_ct).toFixed(2));
    if (steps > 0) beforeFrame(row, () => this.#drawStrip(row));
  }

  #drawStrip({ strip, lengths }) {
    const context = fitCanvas(strip);
    const [width, height] = [strip.clientWidth, strip.clientHeight];
    const most = Math.max(...lengths, 2);
    const wide = width / STRIP;
    context.clearRect(0, 0, width, height);
    context.fillStyle = this.palette.css.draft;
    lengths.forEach((length, i) => {
      const tall = (length / most) * height;
      context.fillRect(i * wide, height - tall, Math.max(wide - 1, 1), tall);
    });
  }
}

function describe(requests, total) {
  const waiting = requests.filter((request) => request.phase === "waiting").length;
  const hidden = total - requests.length;
  return `${count(requests.length - waiting)} running, ${count(waiting + hidden)} waiting`;
}

/** Requests that share a cached run, by serial: {length, rids of the others, their number}. */
export function sharedPrefixes(requests, runs) {
  const holders = new Map();
  for (const request of requests) {
    for (let run = runs.get(request.node); run; run = run.parent) {
      if (!holders.has(run.serial)) holders.set(run.serial, []);
      holders.get(run.serial).push(request);
    }
  }
  const found = new Map();
  for (const request of requests) {
    for (let run = runs.get(request.node); run; run = run.parent) {
      const all = holders.get(run.serial);
      if (all.length < 2) continue;
      const other = all.find((one) => one !== request);
      found.set(request.serial, { length: run.end, rid: other.rid, others: all.length - 1 });
      break;
    }
  }
  return found;
}

function describeShared(request, shared) {
  if (!request.cached_len) return "";
  if (!shared) return `${plural(request.cached_len, "token")} of the cache`;
  const more = shared.others > 1 ? ` and ${count(shared.others - 1)} more` : "";
  return `${plural(shared.length, "token")} with ${shared.rid}${more}`;
}
