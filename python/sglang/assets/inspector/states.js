// Slots of recurrent state: those of running requests, then the checkpoints.

import { beforeFrame, byId, count, fitCanvas, plural, setText } from "./dom.js";

export const SLOT_STATES = ["free", "running", "cached", "taken", "quarantined"];
const MEANING = {
  free: "free",
  running: "state of a running request",
  cached: "checkpoint of the prefix cache",
  taken: "checkpoint of a request, not in the cache yet",
  quarantined: "damaged; watched or kept out of use",
};
// A checkpoint that waits for the cache looks like what a request holds.
const COLOURS = { free: "free", running: "running", cached: "cached", taken: "locked", quarantined: "quarantined" };
const COLUMNS = 3;
const CELL = 14;
const GAP = 2;

/** One [state, position, holder] per slot, from slot 1 on. */
export function readSlots(ints) {
  return Array.from({ length: ints.length / COLUMNS }, (_, i) => ({
    slot: i + 1,
    state: SLOT_STATES[ints[COLUMNS * i]],
    position: ints[COLUMNS * i + 1],
    holder: ints[COLUMNS * i + 2],
  }));
}

/** handlers: nameOf(holder) in words; onPick(holder) of a click or Enter. */
export class StateView {
  constructor(canvas, palette, handlers) {
    this.canvas = canvas;
    this.palette = palette;
    this.handlers = handlers;
    this.slots = [];
    this.numRows = 0;
    this.followed = null;
    this.cursor = 0;
    this.#listen();
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Show these slots, of which the first `numRows` belong to requests. */
  update(slots, numRows) {
    this.slots = slots;
    this.numRows = numRows;
    byId("states-card").hidden = slots.length === 0;
    const rows = slots.slice(0, numRows);
    const checkpoints = slots.slice(numRows);
    const number = (among, state) => count(among.filter((slot) => slot.state === state).length);
    setText(byId("states-count"), [
      `${number(rows, "running")} of ${plural(numRows, "request state")} in use`,
      `${plural(checkpoints.length, "checkpoint")}: ${number(checkpoints, "cached")} cached`,
      `${number(checkpoints, "taken")} of requests`,
      `${number(checkpoints, "quarantined")} quarantined`,
    ].join(" · "));
    this.#describe();
    this.draw();
  }

  follow(owners) {
    this.followed = owners;
    this.draw();
  }

  setPalette(palette) {
    this.palette = palette;
    this.draw();
  }

  draw() {
    beforeFrame(this, () => this.drawNow());
  }

  drawNow() {
    const columns = this.#columns();
    const lines = Math.ceil(this.slots.length / columns);
    const height = `${Math.max(lines, 1) * (CELL + GAP)}px`;
    if (this.canvas.style.height !== height) this.canvas.style.height = height;
    const context = fitCanvas(this.canvas, { alpha: false });
    context.fillStyle = this.palette.css.card;
    context.fillRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    for (const { slot, state, holder } of this.slots) {
      const [left, top] = this.#placeOf(slot);
      const isFaded = this.followed !== null && !this.followed.has(holder);
      context.globalAlpha = isFaded ? 0.2 : 1;
      context.fillStyle = this.palette.css[COLOURS[state]];
      context.fillRect(left, top, CELL, CELL);
    }
    context.globalAlpha = 1;
    if (this.cursor) {
      const [left, top] = this.#placeOf(this.cursor);
      context.strokeStyle = this.palette.css.text;
      context.lineWidth = 1.5;
      context.strokeRect(left, top, CELL, CELL);
    }
  }

  #columns() {
    return Math.max(1, Math.floor(this.canvas.clientWidth / (CELL + GAP)));
  }

  #placeOf(slot) {
    const columns = this.#columns();
    const index = slot - 1;
    return [(index % columns) * (CELL + GAP), Math.floor(index / columns) * (CELL + GAP)];
  }

  #slotAt(x, y) {
    const column = Math.floor(x / (CELL + GAP));
    if (column >= this.#columns()) return 0;
    const slot = Math.floor(y / (CELL + GAP)) * this.#columns() + column + 1;
    return slot >= 1 && slot <= this.slots.length ? slot : 0;
  }

  #point(slot) {
    this.cursor = slot;
    this.#describe();
    this.draw();
  }

  #describe() {
    const found = this.slots[this.cursor - 1];
    const parts = found ? [`slot ${count(found.slot)}: ${MEANING[found.state]}`] : [];
    if (found?.position) parts.push(`after ${plural(found.position, "token")}`);
    if (found?.holder) parts.push(this.handlers.nameOf(found.holder));
    setText(byId("states-note"), parts.join(" · "));
  }

  #pick() {
    const holder = this.slots[this.cursor - 1]?.holder;
    if (holder) this.handlers.onPick(holder);
  }

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.#point(this.#slotAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("click", (event) => {
      this.#point(this.#slotAt(event.offsetX, event.offsetY));
      this.#pick();
    });
    canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns(), ArrowDown: this.#columns() };
      const to = this.cursor ? this.cursor + steps[event.key] : 1;
      if (event.key in steps && this.slots.length) {
        if (to >= 1 && to <= this.slots.length) this.#point(to);
      } else if (event.key === "Enter") this.#pick();
      else return;
      event.preventDefault();
    });
  }
}
