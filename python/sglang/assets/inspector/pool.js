// The pool as the page knows it: cells, clocks, and the latest changes of pages.

export const STATES = [
  "free", "running", "cached", "locked", "draft", "quarantined", "poisoned", "unknown",
];
export const MEANING = {
  free: "nobody holds it",
  running: "a request's own tokens",
  cached: "of the prefix cache; may be evicted",
  locked: "of the prefix cache; a request relies on it",
  draft: "a request's reserve for drafts",
  quarantined: "damaged; watched or kept out of use",
  poisoned: "free; its records say who had it",
  unknown: "allocated, but no holder is known",
};
const STATE_MASK = 7;
const WINDOW_BIT = 8;
const OWNER_SHIFT = 4;
const REMEMBERED_CHANGES = 65536;

export const stateOf = (cell) => cell & STATE_MASK;
export const hasWindow = (cell) => (cell & WINDOW_BIT) !== 0;
/** The serial of a request, minus that of a cached run, or 0. */
export const ownerOf = (cell) => cell >> OWNER_SHIFT;

export class Pool {
  constructor() {
    this.pageSize = 1;
    // The number of the next forward, in records of the target pool and of the draft pool.
    this.clocks = [0];
    this.seq = -1;
    this.cells = new Int32Array(0);
    this.written = new Int32Array(0);
    this.counts = new Int32Array(STATES.length);
    this.history = new PageHistory(REMEMBERED_CHANGES);
  }

  get numPages() {
    return this.cells.length;
  }

  get hasRecords() {
    return this.written.length > 0;
  }

  /** Apply decoded frames. Returns what has changed: indices, or null for everything. */
  apply(frames, { pageSize, clocks }) {
    this.pageSize = pageSize;
    this.clocks = clocks.length ? clocks : [0];
    const changed = [];
    let isAll = false;
    for (const frame of frames) {
      if (frame.at === null) {
        this.#replace(frame);
        isAll = true;
      } else if (frame.base === this.seq) {
        this.#change(frame);
        changed.push(frame.at);
      }
      this.seq = frame.seq;
    }
    if (isAll) return null;
    return changed.length === 1 ? changed[0] : Int32Array.from(changed.flatMap((at) => [...at]));
  }

  #replace(frame) {
    if (frame.cells.length !== this.cells.length) this.history.clear();
    this.cells = frame.cells;
    this.written = frame.written;
    this.counts.fill(0);
    for (const cell of this.cells) this.counts[cell & STATE_MASK] += 1;
  }

  #change({ at, cells, written }) {
    for (let i = 0; i < at.length; i += 1) {
      const index = at[i];
      const before = this.cells[index];
      if (before !== cells[i]) {
        this.counts[before & STATE_MASK] -= 1;
        this.counts[cells[i] & STATE_MASK] += 1;
        this.cells[index] = cells[i];
        this.history.add(index, cells[i], this.clocks);
      }
      if (written.length) this.written[index] = written[i];
    }
  }

  pageOfSlot(slot) {
    return Math.floor(slot / this.pageSize);
  }

  /** Pages by holder, for all holders. */
  pagesByOwner() {
    const found = new Map();
    let last = 0;
    let run = 0;
    const add = () => run && found.set(last, (found.get(last) ?? 0) + run);
    for (const cell of this.cells) {
      const owner = cell >> OWNER_SHIFT;
      if (owner !== last) {
        add();
        last = owner;
        run = 0;
      }
      run += 1;
    }
    add();
    return found;
  }
}

/** The newest changes of pages, in a ring of fixed size. */
export class PageHistory {
  constructor(capacity) {
    this.pages = new Int32Array(capacity);
    this.cells = new Int32Array(capacity);
    this.clocks = [new Float64Array(capacity), new Float64Array(capacity)];
    this.next = 0;
    this.size = 0;
  }

  clear() {
    this.next = this.size = 0;
  }

  add(index, cell, clocks) {
    const at = this.next;
    this.pages[at] = index;
    this.cells[at] = cell;
    this.clocks.forEach((ring, i) => { ring[at] = clocks[i] ?? 0; });
    this.next = (at + 1) % this.pages.length;
    this.size = Math.min(this.size + 1, this.pages.length);
  }

  /** The changes of one page, oldest first: {cell, clocks}. */
  of(index) {
    const found = [];
    const capacity = this.pages.length;
    for (let i = this.size; i > 0; i -= 1) {
      const at = (this.next - i + capacity) % capacity;
      if (this.pages[at] === index) {
        found.push({ cell: this.cells[at], clocks: this.clocks.map((ring) => ring[at]) });
      }
    }
    return found;
  }
}
