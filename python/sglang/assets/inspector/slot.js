// The slot under the pointer: its holder by the scheduler, its records by the canary.

import { getJson } from "./api.js";
import { byId, count, el, plural, setText } from "./dom.js";
import { MEANING, STATES, ownerOf, stateOf } from "./pool.js";

const REST_MS = 120;
const KEPT_MS = 1000;

/** Records are asked for once the pointer rests, so that moving over the map asks nothing. */
export class SlotPanel {
  constructor(pool, { holderOf, hasRecords, onFollow }) {
    this.pool = pool;
    this.holderOf = holderOf;
    this.hasRecords = hasRecords;
    this.onFollow = onFollow;
    this.slot = null;
    this.timer = 0;
    this.known = null;
  }

  /** Show a slot; null: keep the last one. */
  show(slot) {
    clearTimeout(this.timer);
    if (slot === null) return;
    this.slot = slot;
    const isFresh = this.known?.slot === slot && Date.now() - this.known.time < KEPT_MS;
    if (!isFresh) this.known = null;
    this.render();
    if (!isFresh && this.hasRecords()) this.timer = setTimeout(() => this.#ask(slot), REST_MS);
  }

  async #ask(slot) {
    let answer;
    try {
      answer = await getJson(`canary/slot/${slot}`);
    } catch (error) {
      answer = { records: [], error: error.message };
    }
    if (this.slot !== slot) return;
    this.known = { slot, time: Date.now(), ...answer };
    this.render();
  }

  render() {
    if (this.slot === null) return;
    const { pool, slot } = this;
    const page = pool.pageOfSlot(slot);
    const cell = pool.cells[page - 1];
    if (cell === undefined) return;
    const offset = pool.pageSize > 1 ? `, offset ${slot % pool.pageSize}` : "";
    setText(byId("slot-name"), `${count(slot)} · page ${count(page)}${offset}`);
    const state = STATES[stateOf(cell)];
    const rows = [
      ["State", `${state}: ${MEANING[state]}`],
      ["Owner", this.#owner(ownerOf(cell))],
    ];
    const written = pool.written[page - 1];
    if (written) rows.push([state === "poisoned" ? "Freed" : "Page written", ago(written, pool.clocks)]);
    byId("slot").replaceChildren(factsTable(rows), ...this.#records());
  }

  #owner(owner) {
    const holder = this.holderOf(owner);
    if (holder === null) return owner ? "a request or run that is not listed" : "nobody";
    if (holder.rid === undefined) return holder.text;
    const button = el("button", { type: "button", class: "link mono" }, holder.rid);
    button.addEventListener("click", () => this.onFollow(owner));
    return button;
  }

  #records() {
    if (!this.hasRecords()) return [el("p", { class: "quiet" }, "The KV canary is off: no records are kept.")];
    if (this.known === null) return [el("p", { class: "quiet" }, "Reading its record …")];
    if (this.known.error) return [el("p", { class: "quiet" }, this.known.error)];
    return this.known.records.flatMap((record) => [
      el("h3", {}, `${titleOf(record)}: ${record.state}`),
      factsTable(recordRows(record)),
    ]);
  }
}

function titleOf({ pool, group, slot }) {
  return `Record of the ${pool} pool${group === "swa" ? `, window slot ${count(slot)}` : ""}`;
}

function recordRows(record) {
  const { writer } = record;
  const by = writer.rid === null ? "" : ` of ${writer.rid}`;
  const rows = [];
  if (record.state === "never written") return rows;
  if (record.position !== null) rows.push(["Position", count(record.position)]);
  if (record.token !== null) rows.push(["Token", String(record.token)]);
  rows.push([
    record.state === "freed" ? "Freed" : "Writer",
    record.state === "freed" ? `before forward ${count(writer.forward)}; last owner${by || " not known"}`
      : `${writer.kind}${by} in forward ${count(writer.forward)}`,
  ]);
  rows.push(["Lineage", mono(record.lineage)], ["Fingerprint", mono(record.fingerprint)]);
  return rows;
}

export const mono = (text) => el("span", { class: "mono" }, text);

export function factsTable(rows) {
  return el("table", { class: "facts-table" }, el("tbody", {}, ...rows.map(([name, value]) =>
    el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))));
}

/** clocks: of the target's pool and, with drafts, of theirs. */
function ago(written, clocks) {
  const pool = clocks.length > 1 ? " of the target pool" : "";
  return `in forward ${count(written)}${pool}, ${plural(Math.max(clocks[0] - written, 0), "forward")} ago`;
}
