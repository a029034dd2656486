// The prefix tree as an icicle: from left to right by token position, branches below
// each other.

import { beforeFrame, fitCanvas, plural } from "./dom.js";

const COLUMNS = 7;
const MIN_LABEL = 24;

/** The runs of a snapshot's table, by serial: parents come before children. */
export function readTree(table) {
  const runs = new Map();
  for (let at = 0; at + COLUMNS <= table.length; at += COLUMNS) {
    const [serial, parent, start, length, locks, hits, idle] = table.subarray(at, at + COLUMNS);
    const run = { serial, start, length, end: start + length, locks, hits, idle, children: [], weight: 0 };
    run.parent = runs.get(parent) ?? null;
    run.parent?.children.push(run);
    runs.set(serial, run);
  }
  for (const run of [...runs.values()].reverse()) {
    run.weight = Math.max(1, run.children.reduce((sum, child) => sum + child.weight, 0));
  }
  return runs;
}

/** The serials of a run and of all before it, as holders of pages. */
export function pathOwners(runs, serial) {
  const found = [];
  for (let run = runs.get(serial); run; run = run.parent) found.push(-run.serial);
  return found;
}

/** Draws runs on `canvas`. handlers: onPoint(run or null), onPick(run). */
export class TreeView {
  constructor(canvas, palette, handlers) {
    this.canvas = canvas;
    this.palette = palette;
    this.handlers = handlers;
    this.runs = new Map();
    this.boxes = [];
    this.followed = null;
    this.chosen = 0;
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.#point(this.#at(event)));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("click", (event) => {
      const run = this.#at(event);
      if (run) handlers.onPick(run);
    });
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  update(runs) {
    this.runs = runs;
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
    beforeFrame(this, () => this.#drawNow());
  }

  #drawNow() {
    const context = fitCanvas(this.canvas);
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    context.clearRect(0, 0, width, height);
    this.boxes = [];
    if (!this.runs.size) {
      context.fillStyle = this.palette.css.quiet;
      context.font = "13px system-ui, sans-serif";
      context.fillText("Nothing is cached.", 2, 20);
      return;
    }
    this.#layOut(width, height - 18);
    for (const box of this.boxes) this.#drawBox(context, box);
    this.#drawAxis(context, width, height);
  }

  #layOut(width, height) {
    let end = 1;
    for (const run of this.runs.values()) end = Math.max(end, run.end);
    this.end = end;
    const tops = [...this.runs.values()].filter((run) => run.parent === null);
    const total = tops.reduce((sum, run) => sum + run.weight, 0);
    const place = (siblings, top, perWeight) => {
      for (const run of siblings) {
        const tall = run.weight * perWeight;
        const left = (run.start / end) * width;
        const wide = (run.length / end) * width;
        this.boxes.push({ run, left, top, wide, tall });
        place(run.children, top, perWeight);
        top += tall;
      }
    };
    place(tops, 0, Math.min(height / total, 30));
  }

  #drawBox(context, { run, left, top, wide, tall }) {
    const { css } = this.palette;
    const isFaded = this.followed !== null && !this.followed.has(-run.serial);
    context.globalAlpha = isFaded ? 0.25 : run.locks ? 1 : 0.4 + 0.6 / (1 + run.idle / 64);
    context.fillStyle = run.locks ? css.locked : css.cached;
    const gap = tall > 4 ? 1 : 0;
    context.fillRect(left, top, Math.max(wide - 1, 0.5), Math.max(tall - gap, 0.4));
    context.globalAlpha = 1;
    if (run.serial === this.chosen) {
      context.strokeStyle = css.text;
      context.strokeRect(left + 0.5, top + 0.5, wide - 2, Math.max(tall - 2, 1));
    }
    if (wide < MIN_LABEL || tall < 13) return;
    context.fillStyle = run.locks ? css.card : css.text;
    context.font = "11px system-ui, sans-serif";
    const label = labelsOf(run).find((text) => context.measureText(text).width < wide - 8);
    if (label) context.fillText(label, left + 5, top + tall / 2 + 4);
  }

  #drawAxis(context, width, height) {
    const { css } = this.palette;
    const step = niceStep(this.end / Math.max(width / 110, 1));
    context.fillStyle = css.quiet;
    context.font = "11px system-ui, sans-serif";
    for (let at = 0; at <= this.end; at += step) {
      const x = (at / this.end) * width;
      context.fillRect(x, height - 16, 1, 4);
      if (x < width - 40) context.fillText(at === 0 ? "token 0" : String(at), x + 3, height - 3);
    }
  }

  #at(event) {
    const { offsetX: x, offsetY: y } = event;
    const box = this.boxes.find((b) =>
      x >= b.left && x < b.left + b.wide && y >= b.top && y < b.top + b.tall);
    return box ? box.run : null;
  }

  #point(run) {
    const serial = run ? run.serial : 0;
    if (serial === this.chosen) return;
    this.chosen = serial;
    this.handlers.onPoint(run);
    this.draw();
  }

  #onKey(event) {
    const run = this.runs.get(this.chosen);
    const tops = [...this.runs.values()].filter((other) => other.parent === null);
    const siblings = run ? (run.parent ? run.parent.children : tops) : tops;
    const place = run ? siblings.indexOf(run) : -1;
    const next = {
      ArrowUp: () => siblings[Math.max(place - 1, 0)],
      ArrowDown: () => siblings[Math.min(place + 1, siblings.length - 1)],
      ArrowLeft: () => run?.parent,
      ArrowRight: () => (run ? run.children[0] : tops[0]),
    }[event.key];
    if (next) this.#point(next() ?? run ?? null);
    else if (event.key === "Enter" && run) this.handlers.onPick(run);
    else return;
    event.preventDefault();
  }
}

/** Labels of a run, the longest first. */
function labelsOf({ length, hits, locks }) {
  const parts = [plural(length, "token")];
  if (hits) parts.push(plural(hits, "hit"));
  if (locks) parts.push(`${locks} now`);
  return [...parts.keys()].reverse().map((end) => parts.slice(0, end + 1).join(" · ")).concat(String(length));
}

export function describeRun(run) {
  return `tokens ${run.start} to ${run.end - 1} · ${plural(run.hits, "hit")} · `
    + `${plural(run.locks, "request")} now · ${plural(run.children.length, "branch").replace("branchs", "branches")}`;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= rough) ?? 10 * power;
}
