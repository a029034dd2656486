// The map of the pool: one cell per page, drawn from one bitmap; slots when zoomed in.

import { beforeFrame, fitCanvas } from "./dom.js";
import { paint } from "./palette.js";
import { MapView } from "./view.js";

const GAP_FROM = 5;
const SLOTS_FROM = 26;
const ZOOM_STEP = 1.5;

/** Draws `pool` on `canvas`, at most once per frame of the screen and only after a change.
 *
 * handlers: onPoint(slot or null) of the pointer or the cursor, onPick(slot) of a click
 * or Enter.
 */
export class PoolMap {
  constructor(canvas, pool, palette, handlers) {
    this.canvas = canvas;
    this.pool = pool;
    this.palette = palette;
    this.handlers = handlers;
    this.mode = "state";
    this.followed = null;
    this.marked = -1;
    this.fills = new Map();
    this.view = new MapView();
    this.cursor = -1;
    this.bitmap = document.createElement("canvas");
    this.image = null;
    this.pixels = new Uint32Array(0);
    this.frames = 0;
    this.#listen();
    new ResizeObserver(() => this.refresh()).observe(canvas);
  }

  /** Draw anew what has changed: indices, or null for everything. */
  refresh(changed = null) {
    if (this.#layOut()) changed = null;
    if (this.pool.numPages) {
      const options = { at: changed, followed: this.followed };
      paint(this.pool, this.pixels, this.palette, this.mode, options);
      this.#upload(changed);
    }
    this.draw();
  }

  setMode(mode) {
    this.mode = mode;
    this.refresh();
  }

  setPalette(palette) {
    this.palette = palette;
    this.refresh();
  }

  /** Keep the colours of these holders alone; null: of all. */
  follow(owners) {
    this.followed = owners;
    this.refresh();
  }

  /** Mark a slot and bring it into view; -1: none. */
  mark(slot) {
    this.marked = slot;
    if (slot >= 0) this.view.reveal(this.#indexOf(slot));
    this.draw();
  }

  zoom(factor, x, y) {
    this.view.zoom(factor, x, y);
    this.draw();
  }

  zoomIn() {
    this.#zoomSelected(ZOOM_STEP);
  }

  zoomOut() {
    this.#zoomSelected(1 / ZOOM_STEP);
  }

  /** Zoom about the marked slot, or the cursor's, and keep it in view. */
  #zoomSelected(factor) {
    const slot = this.marked >= 0 ? this.marked : this.cursor;
    const { view } = this;
    if (slot < 0) {
      this.zoom(factor, view.width / 2, view.height / 2);
      return;
    }
    view.reveal(this.#indexOf(slot));
    this.zoom(factor, ...view.centreOf(this.#indexOf(slot)));
    view.reveal(this.#indexOf(slot));
  }

  fit() {
    this.view.fit();
    this.draw();
  }

  draw() {
    beforeFrame(this, () => this.drawNow());
  }

  drawNow() {
    const context = fitCanvas(this.canvas, { alpha: false });
    const { view, palette } = this;
    context.fillStyle = palette.css.card;
    context.fillRect(0, 0, view.width, view.height);
    if (!this.pool.numPages) return;
    context.imageSmoothingEnabled = view.scale < 1;
    context.drawImage(
      this.bitmap, view.x, view.y, view.columns * view.scale, view.rows * view.scale,
    );
    if (view.scale >= SLOTS_FROM && this.pool.pageSize > 1) this.#drawSlots(context);
    if (view.scale >= GAP_FROM) this.#drawGaps(context, 1, palette.css.card, 1);
    this.#frame(context, this.cursor, palette.css.text, 1.5);
    if (this.marked >= 0) this.#frame(context, this.marked, palette.css.bad, 2.5, 4);
    this.frames += 1;
  }

  /** Adapt to the sizes of pool and canvas; returns whether all must be painted. */
  #layOut() {
    const { canvas, pool, view } = this;
    const isNew = view.layOut(pool.numPages, canvas.clientWidth, canvas.clientHeight);
    if (isNew && pool.numPages) {
      this.bitmap.width = view.columns;
      this.bitmap.height = view.rows;
      this.image = new ImageData(view.columns, view.rows);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    return isNew;
  }

  #upload(changed) {
    const context = this.bitmap.getContext("2d");
    if (changed === null) {
      context.putImageData(this.image, 0, 0);
    } else if (changed.length) {
      const columns = this.view.columns;
      const first = Math.floor(changed.reduce((a, b) => Math.min(a, b)) / columns);
      const last = Math.floor(changed.reduce((a, b) => Math.max(a, b)) / columns);
      context.putImageData(this.image, 0, 0, 0, first, columns, last - first + 1);
    }
  }

  /** Lines between pages, or between the `parts` x `parts` slots of each. */
  #drawGaps(context, parts, colour, width) {
    const { x, y, scale, columns, rows } = this.view;
    const area = this.view.visible();
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    for (let c = area.left * parts; c <= (area.right + 1) * parts; c += 1) {
      const at = Math.round(x + (c * scale) / parts) + 0.5;
      context.moveTo(at, Math.max(y, 0));
      context.lineTo(at, y + rows * scale);
    }
    for (let r = area.top * parts; r <= (area.bottom + 1) * parts; r += 1) {
      const at = Math.round(y + (r * scale) / parts) + 0.5;
      context.moveTo(Math.max(x, 0), at);
      context.lineTo(x + columns * scale, at);
    }
    context.stroke();
  }

  #drawSlots(context) {
    const { pool, view } = this;
    const parts = slotParts(pool.pageSize);
    const size = view.scale / parts;
    context.fillStyle = this.palette.css.card;
    context.globalAlpha = 0.72;
    const area = view.visible();
    for (let row = area.top; row <= area.bottom; row += 1) {
      for (let column = area.left; column <= area.right; column += 1) {
        const index = row * view.columns + column;
        if (index >= pool.numPages) break;
        const used = this.fills.get(index + 1) ?? pool.pageSize;
        for (let slot = used; slot < parts * parts; slot += 1) {
          const left = view.x + column * view.scale + (slot % parts) * size;
          const top = view.y + row * view.scale + Math.floor(slot / parts) * size;
          context.fillRect(left, top, size, size);
        }
      }
    }
    context.globalAlpha = 0.45;
    if (size >= 5) this.#drawGaps(context, parts, this.palette.css.card, 1);
    context.globalAlpha = 1;
  }

  /** A frame around a slot, or around its page where slots are not shown. */
  #frame(context, slot, colour, width, margin = 0) {
    if (slot < 0) return;
    const { view, pool } = this;
    const index = this.#indexOf(slot);
    let left = view.x + (index % view.columns) * view.scale;
    let top = view.y + Math.floor(index / view.columns) * view.scale;
    let size = view.scale;
    if (size >= SLOTS_FROM && pool.pageSize > 1) {
      const parts = slotParts(pool.pageSize);
      const offset = slot % pool.pageSize;
      size /= parts;
      left += (offset % parts) * size;
      top += Math.floor(offset / parts) * size;
    }
    // A cell of less than a pixel must still be found.
    const grown = Math.max(margin, (8 - size) / 2);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(left - grown, top - grown, size + 2 * grown, size + 2 * grown);
  }

  #indexOf(slot) {
    return this.pool.pageOfSlot(slot) - 1;
  }

  /** The slot at a place of the canvas; -1: none. */
  slotAt(px, py) {
    const { view, pool } = this;
    const index = view.cellAt(px, py);
    if (index < 0 || index >= pool.numPages) return -1;
    let offset = 0;
    if (view.scale >= SLOTS_FROM && pool.pageSize > 1) {
      const parts = slotParts(pool.pageSize);
      const [u, v] = view.insideOf(px, py);
      offset = Math.min(Math.floor(v * parts) * parts + Math.floor(u * parts), pool.pageSize - 1);
    }
    return (index + 1) * pool.pageSize + offset;
  }

  #point(slot) {
    if (slot === this.cursor) return;
    this.cursor = slot;
    this.handlers.onPoint(slot < 0 ? null : slot);
    this.draw();
  }

  #listen() {
    const { canvas } = this;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      drag = { x: event.offsetX, y: event.offsetY, moved: 0 };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag === null) {
        this.#point(this.slotAt(event.offsetX, event.offsetY));
        return;
      }
      const [dx, dy] = [event.offsetX - drag.x, event.offsetY - drag.y];
      drag = { x: event.offsetX, y: event.offsetY, moved: drag.moved + Math.abs(dx) + Math.abs(dy) };
      this.view.pan(dx, dy);
      this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      const slot = this.slotAt(event.offsetX, event.offsetY);
      if (drag !== null && drag.moved < 4 && slot >= 0) {
        this.#point(slot);
        this.handlers.onPick(slot);
      }
      drag = null;
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * 0.002), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  #onKey(event) {
    const columns = this.view.columns * this.pool.pageSize;
    const page = this.pool.pageSize;
    const steps = { ArrowLeft: -page, ArrowRight: page, ArrowUp: -columns, ArrowDown: columns };
    if (event.key in steps && this.pool.numPages) {
      const from = this.cursor < 0 ? page : this.cursor;
      const to = this.cursor < 0 ? page : from + steps[event.key];
      if (to >= page && to < (this.pool.numPages + 1) * page) {
        this.view.reveal(this.#indexOf(to));
        this.#point(to);
      }
    } else if (event.key === "+" || event.key === "=") this.zoomIn();
    else if (event.key === "-") this.zoomOut();
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.cursor >= 0) this.handlers.onPick(this.cursor);
    else return;
    event.preventDefault();
  }
}

const slotParts = (pageSize) => Math.ceil(Math.sqrt(pageSize));
