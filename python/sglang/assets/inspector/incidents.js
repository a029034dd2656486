// The list of incidents, and one of them: expected and found, its slot, writer and story.

import { getJson } from "./api.js";
import { byId, count, el, plural, setText } from "./dom.js";
import { STATES, ownerOf, stateOf } from "./pool.js";
import { factsTable, mono } from "./slot.js";

const KEPT = 64;
const RECENT_SECONDS = 60;
const RECORD_FIELDS = ["token", "position", "phase", "slot", "lineage", "fingerprint"];

const NO_RECORDS = "Nothing records what led to an incident, so this one cannot be replayed: start the server with --kv-canary-report-dir (with drafts also --kv-canary-report-tokens).";
const NOT_RECORDED = "This incident has no record: only the first of a kind is recorded, and with drafts only with --kv-canary-report-tokens. An earlier incident of this kind may be replayed in its place.";

export class IncidentView {
  constructor(pool, { onMark, nameOf }) {
    this.pool = pool;
    this.onMark = onMark;
    this.nameOf = nameOf;
    this.hello = null;
    this.summaries = [];
    this.documents = new Map();
    this.current = null;
    this.index = 0;
  }

  /** Take the list; the newest one is read ahead, as an engine in mode `raise` goes. */
  update(summaries) {
    this.summaries = summaries;
    setText(byId("incidents-count"), summaries.length ? count(summaries.length) : "");
    this.#renderList();
    if (summaries.length) this.#load(summaries[0].name).catch(() => {});
  }

  /** The number of incidents in the minute before `now`, in seconds since 1970. */
  recent(now) {
    return this.summaries.filter((one) => Date.parse(one.time) / 1000 > now - RECENT_SECONDS).length;
  }

  #renderList() {
    const place = byId("incidents");
    if (!this.summaries.length) {
      const text = this.hello.kv_canary === "none" ? "The KV canary is off: nothing is checked." : "None.";
      place.replaceChildren(el("p", { class: "quiet" }, text));
      return;
    }
    place.replaceChildren(el("ul", { class: "incident-list" }, ...this.summaries.map((one) => {
      const button = el("button", { type: "button", class: one.name === this.current ? "current" : "" },
        el("span", { class: "what" }, one.diagnosis),
        el("span", { class: "quiet" }, ` · ${plural(one.num_violations, "violation")}`),
        one.is_healed ? el("span", { class: "healed" }, "healed") : null,
        el("br"),
        el("span", { class: "quiet" }, `${one.worker} forward ${count(one.forward)} · ${one.rid ?? "no request"}${one.slot >= 0 ? ` · slot ${count(one.slot)}` : ""} · ${clockTime(one.time)}`));
      button.addEventListener("click", () => this.open(one.name));
      return el("li", {}, button);
    })));
  }

  async #load(name) {
    if (!this.documents.has(name)) {
      const found = await getJson(`canary/incidents/${encodeURIComponent(name)}`);
      if (this.documents.size >= KEPT) this.documents.delete(this.documents.keys().next().value);
      this.documents.set(name, found);
    }
    return this.documents.get(name);
  }

  async open(name, index = 0) {
    this.current = name;
    this.index = index;
    const place = byId("incident");
    place.hidden = false;
    try {
      this.#render(await this.#load(name));
    } catch (error) {
      place.replaceChildren(el("p", {}, error.message), this.#closeButton());
    }
    place.scrollIntoView({ block: "nearest" });
  }

  close() {
    this.current = null;
    byId("incident").hidden = true;
    this.onMark(-1);
  }

  #closeButton() {
    return el("button", { type: "button", onclick: () => this.close() }, "Close");
  }

  #render(incident) {
    const violation = incident.violations[this.index];
    this.onMark(violation.slot);
    const number = incident.violations.length + incident.dropped;
    const head = el("div", { class: "card-head" },
      el("h2", { id: "incident-title" }, `Incident ${this.current}: ${violation.diagnosis}`),
      el("span", { class: "quiet" }, `${clockTime(incident.time)} · mode ${incident.mode}, real data ${incident.real_data} · ${plural(number, "violation")}`),
      el("span", { class: "grow" }), this.#closeButton());
    const left = [
      factsTable(aboutRows(violation)),
      el("h3", {}, "Expected and found"),
      compareTable(violation),
      ...this.#choices(incident),
    ];
    const right = [
      el("h3", {}, `Time line of ${violation.page >= 0 ? `page ${count(violation.page)}` : "the finding"}, in forwards of the ${violation.worker} pool`),
      el("ul", { class: "timeline" }, ...this.#timeline(incident, violation)),
      el("h3", {}, "Replay"), ...this.#replay(incident),
    ];
    byId("incident").replaceChildren(head,
      el("div", { class: "incident-grid" }, el("div", {}, ...left), el("div", {}, ...right)));
  }

  #choices(incident) {
    if (incident.violations.length < 2) return [];
    const buttons = incident.violations.map((one, i) => {
      const text = one.slot >= 0 ? `slot ${one.slot}` : one.reasons[0];
      const button = el("button", { type: "button", class: i === this.index ? "current" : "" }, text);
      button.addEventListener("click", () => this.open(this.current, i));
      return button;
    });
    return [el("h3", {}, "Violations of this incident"), el("div", { class: "choices" }, ...buttons)];
  }

  #timeline(incident, violation) {
    const events = [...recordEvents(incident, violation), ...this.#seenEvents(violation)];
    events.sort((a, b) => a.forward - b.forward || a.order - b.order);
    return events.map(({ forward, text, kind }) => el("li", { class: kind ?? "" },
      el("span", { class: "when" }, forward ? `forward ${count(forward)}` : "before"), text));
  }

  /** Changes of the page's holder that this page has seen while it was open. */
  #seenEvents({ page, group, worker }) {
    if (page < 1 || group === "swa") return [];
    const pool = worker === "draft" ? 1 : 0;
    return this.pool.history.of(page - 1).map(({ cell, clocks }) => {
      const owner = ownerOf(cell);
      const whom = owner ? `, held by ${this.nameOf(owner)}` : "";
      return { forward: clocks[pool], order: 1, text: `seen ${STATES[stateOf(cell)]}${whom}` };
    });
  }

  #replay(incident) {
    const file = `kv_canary-${this.current}-forward${incident.forward}.json`;
    const save = el("button", { type: "button", onclick: () => saveJson(file, incident) }, "Save incident");
    const command = incident.replay;
    if (command == null) {
      const why = this.hello.has_records ? NOT_RECORDED : NO_RECORDS;
      return [el("div", { class: "command" }, save), el("p", { class: "quiet" }, why)];
    }
    const copy = el("button", { type: "button" }, "Copy");
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command);
      setText(copy, "Copied");
    });
    return [
      el("div", { class: "command" }, el("code", {}, command), copy, save),
      el("p", { class: "quiet" }, "To be run in the server's --kv-canary-report-dir, where incident and record lie."),
    ];
  }
}

function aboutRows(violation) {
  const where = violation.slot < 0 ? "no slot"
    : `slot ${count(violation.slot)}, page ${count(violation.page)}, position ${count(violation.position)}`;
  return [
    ["Request", violation.rid === null ? "none" : mono(violation.rid)],
    ["Found by", `${violation.launch} of the ${violation.worker} pool in forward ${count(violation.forward)} (${violation.forward_mode ?? "mode not known"})`],
    ["Where", `${where}; held by: ${violation.owner}`],
    ["Reasons", mono(violation.reasons.join(" + "))],
    ["Last writer", writerText(violation.writer)],
    ["Look at", violation.look_at],
  ];
}

function compareTable({ expected, found, slot }) {
  const values = { expected, found: { ...found, slot: slot >= 0 ? slot : undefined } };
  const fields = RECORD_FIELDS.filter((name) => values.expected[name] != null || values.found[name] != null);
  const rows = fields.map((name) => {
    const [left, right] = [values.expected[name], values.found[name]];
    const isKnown = left != null && right != null && left !== -1;
    const differs = isKnown && left !== right;
    const cells = differs ? marked(String(left), String(right)) : [[shown(left)], [shown(right)]];
    return el("tr", { class: differs ? "differs" : "" }, el("th", { scope: "row" }, name),
      ...cells.map((parts) => el("td", { class: "mono" }, ...parts)), el("td", {}, differs ? "differs" : ""));
  });
  return el("table", { class: "compare" },
    el("thead", {}, el("tr", {}, el("th"), el("th", { scope: "col" }, "expected"), el("th", { scope: "col" }, "found"), el("th"))),
    el("tbody", {}, ...rows));
}

/** Two values with what is between their common ends marked. */
function marked(left, right) {
  const most = Math.min(left.length, right.length);
  let head = 0;
  while (head < most && left[head] === right[head]) head += 1;
  let tail = 0;
  while (tail < most - head && left.at(-1 - tail) === right.at(-1 - tail)) tail += 1;
  return [left, right].map((text) => {
    const end = text.length - tail;
    return [text.slice(0, head), el("mark", {}, text.slice(head, end)), text.slice(end)];
  });
}

const shown = (value) => (value == null || value === -1 ? "–" : String(value));

/** The story of the page by its record and the incident. */
function recordEvents(incident, violation) {
  const { writer } = violation;
  const events = [];
  if (writer.forward) {
    const isFreed = writer.kind === "poison";
    const text = isFreed ? `freed; its last owner was ${writer.rid ?? "a request that is not known"}` : `written by ${writerText(writer, false)}`;
    events.push({ forward: writer.forward, order: isFreed ? 0 : 2, text });
  } else {
    events.push({ forward: 0, order: 0, text: "never written" });
  }
  const reader = violation.rid === null ? "the sweep" : violation.rid;
  events.push({ forward: violation.forward, order: 3, kind: "bad", text: `${violation.launch} for ${reader}: ${violation.diagnosis}` });
  if (incident.healing) {
    const { num_recomputed, num_ended, cached_tokens_cut } = incident.healing;
    events.push({ forward: incident.forward, order: 4, kind: "good", text: `healed: ${plural(num_recomputed, "request")} recomputed, ${count(num_ended)} ended, ${plural(cached_tokens_cut, "cached token")} dropped` });
  }
  return events;
}

function writerText(writer, withForward = true) {
  if (!writer.forward) return "nobody";
  const by = writer.rid === null ? "" : ` of ${writer.rid}`;
  return `${writer.kind}${by}${withForward ? ` in forward ${count(writer.forward)}` : ""}`;
}

const clockTime = (iso) => new Date(iso).toLocaleTimeString("en-GB");

function saveJson(name, content) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }));
  const link = el("a", { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}
