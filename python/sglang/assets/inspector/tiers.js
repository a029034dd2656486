// KV outside of the device: maps of host memory, files, and transfers between engines.

import { decodeBytes } from "./codec.js";
import { beforeFrame, byId, count, el, fitCanvas, plural, setText } from "./dom.js";

const STATES = ["free", "holding", "loading", "writing"];
// Colours of the map of the pool that say the like.
const COLOURS = ["free", "cached", "running", "draft"];
const MEANING = {
  free: "no unit",
  holding: "a unit",
  loading: "a unit that is copied to the device",
  writing: "a unit that is being copied here",
};

/** The card of tiers; hidden as long as there are none. */
export class TierView {
  constructor(palette) {
    this.palette = palette;
    this.maps = new Map();
    this.cells = [];
  }

  /** Take the tiers of a snapshot, or null. */
  async update(tiers) {
    byId("tiers-card").hidden = tiers === null;
    if (tiers === null) return;
    this.cells = await Promise.all((tiers.host ?? []).map((view) => decodeBytes(view.cells)));
    (tiers.host ?? []).forEach((view, i) => this.#fill(view, this.cells[i]));
    setText(byId("tiers-size"), `units of ${plural(tiers.unit_tokens, "token")}`);
    setText(byId("tier-files"), (tiers.files ?? []).map(describeFiles).join(" · "));
    this.#list(tiers.transfers ?? [], tiers.num_transfers ?? 0);
    this.draw();
  }

  setPalette(palette) {
    this.palette = palette;
    this.draw();
  }

  draw() {
    beforeFrame(this, () => [...this.maps.values()].forEach((map) => this.#draw(map)));
  }

  #fill(view, cells) {
    const map = this.maps.get(view.group) ?? this.#add(view.group);
    map.cells = cells;
    const size = `${(cells.length * view.unit_bytes / 2 ** 30).toFixed(1)} GiB`;
    setText(map.name, `host memory, ${view.group}: ${plural(cells.length, "unit")}, ${size}`);
    map.counts.forEach((counted, i) => setText(counted, `${STATES[i]} ${count(view[STATES[i]])}`));
  }

  #add(group) {
    const name = el("div", { class: "quiet" });
    const canvas = el("canvas", { class: "tier-map", role: "img", "aria-label": `Host memory of ${group}, one cell per unit` });
    const counts = STATES.map(() => el("span"));
    const swatches = STATES.map(() => el("span", { class: "swatch" }));
    const legend = el("ul", { class: "legend" }, ...STATES.map((state, i) =>
      el("li", { title: MEANING[state] }, swatches[i], counts[i])));
    const map = { name, canvas, counts, swatches, cells: new Uint8Array(0) };
    byId("tier-maps").append(el("div", {}, name, canvas, legend));
    this.maps.set(group, map);
    return map;
  }

  #draw({ canvas, cells, swatches }) {
    const colours = COLOURS.map((name) => this.palette.css[name]);
    swatches.forEach((swatch, i) => { swatch.style.background = colours[i]; });
    const context = fitCanvas(canvas);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    context.clearRect(0, 0, width, height);
    const columns = Math.max(1, Math.ceil(Math.sqrt(cells.length * width / Math.max(height, 1))));
    const rows = Math.max(1, Math.ceil(cells.length / columns));
    const [wide, tall] = [width / columns, height / rows];
    const gap = Math.min(wide, tall) > 4 ? 1 : 0;
    cells.forEach((state, i) => {
      context.fillStyle = colours[state];
      context.fillRect((i % columns) * wide, Math.floor(i / columns) * tall, wide - gap, tall - gap);
    });
  }

  #list(transfers, total) {
    const table = byId("transfers");
    table.hidden = total === 0;
    table.tBodies[0].replaceChildren(...transfers.map((one) => el("tr", {},
      el("td", { class: "mono" }, one.room),
      el("td", {}, `${one.is_sent ? "to" : "from"} ${one.peer}`),
      el("td", {}, one.state),
      el("td", { class: "number" }, `${megabytes(one.bytes)} of ${megabytes(one.total_bytes)}`),
      el("td", { class: "number" }, `${one.seconds.toFixed(1)} s`))));
    const rest = byId("transfers-rest");
    rest.hidden = total <= transfers.length;
    setText(rest, `and ${plural(total - transfers.length, "more transfer")}`);
  }
}

function describeFiles({ group, units, bytes, max_bytes, oldest_seconds, waiting }) {
  const age = units ? `, the oldest used ${Math.round(oldest_seconds / 60)} min ago` : "";
  const due = waiting ? `, ${plural(waiting, "unit")} to write` : "";
  return `files, ${group}: ${plural(units, "unit")}, ${megabytes(bytes)} of ${megabytes(max_bytes)}${age}${due}`;
}

const megabytes = (bytes) => `${count(Math.round(bytes / 1e6))} MB`;
