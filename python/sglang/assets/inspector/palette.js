// Colours of pages as 32-bit pixels; the base colours are those of the style sheet.

import { STATES } from "./pool.js";

const TABLE = 256;
const AGES = 32;

export const MODES = ["state", "owner", "age", "group"];

/** Colours for the scheme in use; made anew when it changes. */
export class Palette {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    this.card = parseHex(read("card"));
    this.css = Object.fromEntries(
      [...STATES, "text", "quiet", "line", "card", "accent", "bad", "spark", "focus"].map(
        (name) => [name, read(name)],
      ),
    );
    const state = STATES.map((name) => parseHex(read(name)));
    this.states = this.#table(state);
    const light = this.isDark ? 62 : 48;
    this.requests = this.#table(wheel(75, light));
    this.runs = this.#table(wheel(22, this.isDark ? 42 : 74));
    this.ages = this.#table(ramp(this.isDark));
    this.groups = this.#table([state[0], state[1], state[4]]);
  }

  /** Pixels of colours: as they are, and faded for what is not followed. */
  #table(colours) {
    const faded = colours.map((colour) => mix(colour, this.card, 0.82));
    return { full: Uint32Array.from(colours, pixel), faded: Uint32Array.from(faded, pixel) };
  }
}

/** Paint cells of `pool` into `pixels`.
 *
 * at: indices; null: all. followed: holders that keep their colours; null: all do.
 */
export function paint(pool, pixels, palette, mode, { at = null, followed = null } = {}) {
  const { cells, written } = pool;
  const clock = pool.clocks[0];
  const { states, requests, runs, ages, groups } = palette;
  const length = at === null ? cells.length : at.length;
  let lastOwner = 0;
  let isFull = followed === null || followed.has(0);
  for (let i = 0; i < length; i += 1) {
    const index = at === null ? i : at[i];
    const cell = cells[index];
    const state = cell & 7;
    const owner = cell >> 4;
    if (followed !== null && owner !== lastOwner) {
      lastOwner = owner;
      isFull = followed.has(owner);
    }
    let table = states;
    let colour = state;
    if (mode === "owner" && owner !== 0) {
      table = owner > 0 ? requests : runs;
      colour = Math.imul(owner, 0x9e3779b1) >>> 24;
    } else if (mode === "age" && owner !== 0 && written.length) {
      table = ages;
      colour = ageStep(clock - written[index]);
    } else if (mode === "group") {
      table = groups;
      colour = owner === 0 ? 0 : (cell & 8) !== 0 ? 2 : 1;
    }
    pixels[index] = isFull ? table.full[colour] : table.faded[colour];
  }
}

/** The place in the ramp of something so many forwards old: half octaves. */
export function ageStep(forwards) {
  return Math.min(AGES - 1, Math.floor(2 * Math.log2(Math.max(forwards, 0) + 1)));
}

export function oldestAge() {
  return 2 ** (AGES / 2) - 1;
}

function wheel(saturation, light) {
  // Neighbours in the table are far apart on the wheel.
  return Array.from({ length: TABLE }, (_, i) =>
    hsl((i * 137.508) % 360, saturation, light + ((i * 7) % 13) - 6));
}

function ramp(isDark) {
  return Array.from({ length: AGES }, (_, i) => {
    const part = i / (AGES - 1);
    // From a strong orange to the quiet of what is old.
    return hsl(22 + 190 * part ** 1.5, 88 - 62 * part, isDark ? 60 - 32 * part : 50 + 34 * part);
  });
}

function hsl(hue, saturation, light) {
  const s = saturation / 100;
  const l = light / 100;
  const span = s * Math.min(l, 1 - l);
  return [0, 8, 4].map((shift) => {
    const k = (shift + hue / 30) % 12;
    return Math.round(255 * (l - span * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}

function parseHex(text) {
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

function mix(colour, other, part) {
  return colour.map((value, i) => Math.round(value * (1 - part) + other[i] * part));
}

function pixel([red, green, blue]) {
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}

export function cssOf(value) {
  return `rgb(${value & 255} ${(value >> 8) & 255} ${(value >> 16) & 255})`;
}
