// The part of a grid of cells that a canvas shows: its place and scale.

const MAX_SCALE = 240;

export class MapView {
  constructor() {
    this.numCells = 0;
    this.columns = 1;
    this.rows = 1;
    this.width = this.height = 1;
    this.x = this.y = 0;
    this.scale = this.least = 1;
  }

  /** Take the sizes; returns whether the grid is another one. */
  layOut(numCells, width, height) {
    if (numCells === this.numCells && width === this.width && height === this.height) return false;
    this.width = Math.max(width, 1);
    this.height = Math.max(height, 1);
    this.numCells = numCells;
    const columns = Math.max(1, Math.ceil(Math.sqrt((numCells * this.width) / this.height)));
    this.columns = Math.min(columns, Math.max(numCells, 1));
    this.rows = Math.max(1, Math.ceil(numCells / this.columns));
    this.fit();
    return true;
  }

  fit() {
    this.least = Math.min(this.width / this.columns, this.height / this.rows);
    this.scale = this.least;
    this.x = this.y = 0;
  }

  zoom(factor, px, py) {
    const scale = Math.min(Math.max(this.scale * factor, this.least), Math.max(MAX_SCALE, this.least));
    const ratio = scale / this.scale;
    this.x = px - (px - this.x) * ratio;
    this.y = py - (py - this.y) * ratio;
    this.scale = scale;
    this.#clamp();
  }

  pan(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.#clamp();
  }

  /** Bring a cell into view. */
  reveal(index) {
    const left = this.x + (index % this.columns) * this.scale;
    const top = this.y + Math.floor(index / this.columns) * this.scale;
    if (left < 0 || left + this.scale > this.width) this.x += this.width / 2 - left;
    if (top < 0 || top + this.scale > this.height) this.y += this.height / 2 - top;
    this.#clamp();
  }

  /** The place of a cell's centre. */
  centreOf(index) {
    const row = Math.floor(index / this.columns);
    return [this.x + ((index % this.columns) + 0.5) * this.scale, this.y + (row + 0.5) * this.scale];
  }

  /** The cell at a place, or -1. */
  cellAt(px, py) {
    const column = Math.floor((px - this.x) / this.scale);
    const row = Math.floor((py - this.y) / this.scale);
    const isInside = column >= 0 && column < this.columns && row >= 0 && row < this.rows;
    return isInside ? row * this.columns + column : -1;
  }

  /** The place within its cell, each part in [0, 1). */
  insideOf(px, py) {
    return [(px - this.x) / this.scale, (py - this.y) / this.scale].map((at) => at - Math.floor(at));
  }

  /** Columns and rows that can be seen, ends included. */
  visible() {
    return {
      left: Math.max(0, Math.floor(-this.x / this.scale)),
      right: Math.min(this.columns - 1, Math.floor((this.width - this.x) / this.scale)),
      top: Math.max(0, Math.floor(-this.y / this.scale)),
      bottom: Math.min(this.rows - 1, Math.floor((this.height - this.y) / this.scale)),
    };
  }

  /** Leave no empty border that the grid could fill. */
  #clamp() {
    this.x = clamped(this.x, this.width - this.columns * this.scale);
    this.y = clamped(this.y, this.height - this.rows * this.scale);
  }
}

function clamped(at, room) {
  return room >= 0 ? 0 : Math.min(0, Math.max(room, at));
}
