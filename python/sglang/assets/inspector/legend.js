// The legend of the map: what each colour means, and how many pages have it.

import { byId, count, el } from "./dom.js";
import { MEANING, STATES } from "./pool.js";
import { ageStep, cssOf, oldestAge } from "./palette.js";

function swatch(colour) {
  const made = el("span", { class: "swatch" });
  made.style.background = colour;
  return made;
}

function entry(colour, text, title) {
  return el("li", { title }, swatch(colour), text);
}

export function drawLegend(pool, palette, mode) {
  const made = { state: states, owner: owners, age: ages, group: groups }[mode](pool, palette);
  byId("legend").replaceChildren(...made);
}

function states(pool, palette) {
  return STATES.map((name, i) => [name, pool.counts[i]])
    .filter(([name, number]) => number || ["free", "running", "cached"].includes(name))
    .map(([name, number]) => entry(palette.css[name], `${name} ${count(number)}`, MEANING[name]));
}

function owners(_, palette) {
  return [
    entry(cssOf(palette.requests.full[3]), "a request, each in a strong colour of its own"),
    entry(cssOf(palette.runs.full[3]), "a run of the prefix cache, each in a pale one"),
    entry(palette.css.free, "nobody"),
  ];
}

function ages(pool, palette) {
  if (!pool.hasRecords) {
    return [el("li", { class: "quiet" }, "The age of a page is in the KV canary's records, and it is off.")];
  }
  const canvas = el("canvas", { width: "140", height: "1" });
  const context = canvas.getContext("2d");
  for (let x = 0; x < 140; x += 1) {
    context.fillStyle = cssOf(palette.ages.full[ageStep(2 ** (x / 140 * Math.log2(oldestAge())))]);
    context.fillRect(x, 0, 1, 1);
  }
  return [el("li", {}, "written just now", canvas, `${count(oldestAge())} forwards ago or earlier`)];
}

function groups(pool, palette) {
  const [none, full, both] = palette.groups.full;
  return [
    entry(cssOf(none), "free"),
    entry(cssOf(full), "slots of full attention layers"),
    entry(cssOf(both), "slots of sliding window layers, too"),
  ];
}
