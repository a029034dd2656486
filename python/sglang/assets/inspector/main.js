// The inspector: joins the stream of snapshots with the parts of the page.

import { takeKeyOfAddress } from "./api.js";
import { decodeFrames, decodeInts } from "./codec.js";
import { Counters } from "./counters.js";
import { beforeFrame, byId, count, el, plural, setText } from "./dom.js";
import { IncidentView } from "./incidents.js";
import { drawLegend } from "./legend.js";
import { Login } from "./login.js";
import { PoolMap } from "./map.js";
import { Palette } from "./palette.js";
import { Pool, STATES, ownerOf } from "./pool.js";
import { RequestTable } from "./requests.js";
import { SlotPanel } from "./slot.js";
import { StateView, readSlots } from "./states.js";
import { EventStream } from "./stream.js";
import { TierView } from "./tiers.js";
import { TreeView, describeRun, pathOwners, readTree } from "./tree.js";

// A page in the background costs the server nothing after so long.
const HIDDEN_MS = 20000;
const REMEMBERED_NAMES = 4096;

class App {
  constructor() {
    this.hello = null;
    this.requests = new Map();
    // Names of requests, those that have ended among them.
    this.names = new Map();
    this.runs = new Map();
    this.followed = 0;
    this.snapshots = 0;
    this.pool = new Pool();
    this.palette = new Palette();
    const holderOf = (owner) => this.holderOf(owner);
    const onFollow = (owner) => this.follow(owner);
    this.slotPanel = new SlotPanel(this.pool, {
      holderOf, onFollow, hasRecords: () => this.hello !== null && this.hello.kv_canary !== "none",
    });
    this.map = new PoolMap(byId("map"), this.pool, this.palette, {
      onPoint: (slot) => this.slotPanel.show(slot),
      onPick: (slot) => this.follow(ownerOf(this.pool.cells[this.pool.pageOfSlot(slot) - 1])),
    });
    this.table = new RequestTable(this.palette, { onFollow });
    this.tree = new TreeView(byId("tree"), this.palette, {
      onPoint: (run) => setText(byId("tree-note"), run ? describeRun(run) : ""),
      onPick: (run) => this.follow(-run.serial),
    });
    this.tiers = new TierView(this.palette);
    this.states = new StateView(byId("states"), this.palette, {
      nameOf: (owner) => this.nameOf(owner), onPick: onFollow,
    });
    this.counters = new Counters(byId("counters"), this.palette);
    this.incidents = new IncidentView(this.pool, {
      onMark: (slot) => this.map.mark(slot), nameOf: (owner) => this.nameOf(owner),
    });
    this.stream = new EventStream("canary/events", {
      onEvent: (name, data) => this.handle(name, data),
      onLost: (error, seconds) => this.setStatus("trouble", `${error.message} Trying again in ${seconds} s`),
      onRefused: (error) => this.refused(error),
    });
    this.#listen();
  }

  start() {
    takeKeyOfAddress();
    this.login = new Login(() => this.stream.start());
    this.stream.start();
  }

  async handle(name, data) {
    if (name === "hello") this.greet(data);
    else if (name === "snapshot") await this.take(data);
    else if (name === "incidents") this.incidents.update(data.incidents);
    else if (name === "trouble") this.setStatus("trouble", data.message);
    else if (name === "end") this.setStatus("trouble", data.message);
  }

  greet(hello) {
    this.hello = hello;
    this.incidents.hello = hello;
    const canary = hello.kv_canary === "none" ? "off" : `${hello.kv_canary}, ${hello.kv_canary_real_data}`;
    const drafts = hello.speculative_algorithm === null ? [] : [" · drafts ", el("b", {}, hello.speculative_algorithm)];
    byId("facts").replaceChildren("model ", el("b", {}, hello.model), " · canary ", el("b", {}, canary), ...drafts);
    document.title = `${hello.model} · KV cache inspector`;
    byId("banner").hidden = true;
  }

  /** Take a snapshot; `frames` are decoded already where it does not come from a stream. */
  async take(snapshot, frames = null) {
    const changed = this.pool.apply(frames ?? await decodeFrames(snapshot.frames), {
      pageSize: snapshot.pool.page_size, clocks: snapshot.clocks,
    });
    this.runs = readTree(await decodeInts(snapshot.tree));
    this.requests = new Map(snapshot.requests.map((request) => [request.serial, request]));
    this.#remember(snapshot.requests);
    this.map.fills = new Map(snapshot.requests.filter((r) => r.tail_page).map((r) => [r.tail_page, r.tail_fill]));
    if (this.followed && !this.requests.has(this.followed) && !this.runs.has(-this.followed)) this.follow(0);
    const owners = this.followed ? this.ownersOf(this.followed) : null;
    this.map.followed = owners;
    // Ages change everywhere; so does what is followed.
    this.map.refresh(this.map.mode === "age" || owners !== null ? null : changed);
    this.#drawLegend();
    this.table.update(snapshot.requests, snapshot.num_requests, { runs: this.runs, pages: this.pool.pagesByOwner() });
    this.tree.followed = owners;
    this.tree.update(this.runs);
    await this.tiers.update(snapshot.tiers ?? null);
    this.states.followed = owners;
    const slots = readSlots(await decodeInts(snapshot.states));
    this.states.update(slots, snapshot.pool.num_request_states ?? 0);
    this.slotPanel.render();
    const cached = this.pool.counts[STATES.indexOf("cached")] + this.pool.counts[STATES.indexOf("locked")];
    this.counters.update(snapshot.stats, snapshot.time, { hello: this.hello, cachedTokens: cached * snapshot.pool.page_size });
    this.#describe(snapshot);
    this.snapshots += 1;
  }

  #describe(snapshot) {
    const { pool } = snapshot;
    const windows = pool.num_window_pages
      ? ` · ${count(pool.num_window_pages - (pool.num_free_window_pages ?? 0))} of ${count(pool.num_window_pages)} window pages in use` : "";
    setText(byId("pool-size"), `${plural(pool.num_pages, "page")} of ${plural(pool.page_size, "slot")}${windows}`);
    const hidden = snapshot.num_nodes - this.runs.size;
    setText(byId("tree-count"), plural(snapshot.num_nodes, "run") + (hidden > 0 ? `, the largest ${count(this.runs.size)} shown` : ""));
    this.#judge(snapshot);
  }

  /** Say whether all is well, from the last minute. */
  #judge({ forwards, time, stats }) {
    const recent = this.incidents.recent(time);
    const degraded = stats.kv_canary_is_degraded;
    const parts = [`live · step ${count(forwards)}`];
    if (recent) parts.push(`${plural(recent, "incident")} in the last minute`);
    if (degraded) parts.push("degraded");
    this.setStatus(recent ? "trouble" : degraded ? "degraded" : "live", parts.join(" · "));
    byId("incidents-card").classList.toggle("alarm", recent > 0);
  }

  /** A request ({rid}), a cached run ({text}), or null for neither. */
  holderOf(owner) {
    if (owner > 0 && this.requests.has(owner)) return this.requests.get(owner);
    const run = owner < 0 ? this.runs.get(-owner) : undefined;
    return run ? { text: `prefix cache, ${describeRun(run)}` } : null;
  }

  /** A holder in words, also one that is gone. */
  nameOf(owner) {
    if (owner > 0) return this.names.get(owner) ?? "a request of earlier";
    const run = this.runs.get(-owner);
    return run ? `the prefix cache, tokens ${run.start} to ${run.end - 1}` : "the prefix cache";
  }

  #remember(requests) {
    for (const { serial, rid } of requests) this.names.set(serial, rid);
    for (const serial of this.names.keys()) {
      if (this.names.size <= REMEMBERED_NAMES) break;
      this.names.delete(serial);
    }
  }

  /** The holders whose pages a request reads, or a run and all before it. */
  ownersOf(owner) {
    const request = this.requests.get(owner);
    const found = pathOwners(this.runs, request ? request.node : -owner);
    return new Set(request ? [owner, ...found] : found);
  }

  /** Fade everything else on map and tree; 0: show all. */
  follow(owner) {
    this.followed = owner === this.followed ? 0 : owner;
    const owners = this.followed ? this.ownersOf(this.followed) : null;
    this.map.follow(owners);
    this.tree.follow(owners);
    this.states.follow(owners);
    this.table.mark(Math.max(this.followed, 0));
    byId("unfollow").hidden = this.followed === 0;
  }

  setStatus(kind, text) {
    byId("status").className = `status ${kind}`;
    setText(byId("status"), text);
  }

  refused(error) {
    this.setStatus("trouble", error.message);
    if (error.status === 404) {
      byId("banner").hidden = false;
      setText(byId("banner"), error.message);
      return;
    }
    this.login.open(error.message);
  }

  #recolour() {
    this.palette = new Palette();
    const parts = [this.map, this.tree, this.states, this.table, this.tiers, this.counters];
    for (const part of parts) part.setPalette(this.palette);
    this.#drawLegend();
  }

  #drawLegend() {
    beforeFrame(drawLegend, () => drawLegend(this.pool, this.palette, this.map.mode));
  }

  #listen() {
    byId("colour-mode").addEventListener("change", (event) => {
      this.map.setMode(event.target.value);
      this.#drawLegend();
    });
    byId("go-slot").addEventListener("change", (event) => {
      const slot = Number(event.target.value.replaceAll(",", ""));
      const { pageSize, numPages } = this.pool;
      const end = (numPages + 1) * pageSize;
      const isThere = Number.isInteger(slot) && slot >= pageSize && slot < end;
      const wrong = isThere ? "" : `This pool has the slots ${count(pageSize)} to ${count(end - 1)}.`;
      event.target.setCustomValidity(wrong);
      event.target.reportValidity();
      if (!isThere) return;
      this.map.mark(slot);
      this.slotPanel.show(slot);
    });
    byId("zoom-in").addEventListener("click", () => this.map.zoomIn());
    byId("zoom-out").addEventListener("click", () => this.map.zoomOut());
    byId("zoom-fit").addEventListener("click", () => this.map.fit());
    byId("unfollow").addEventListener("click", () => this.follow(0));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#recolour());
    let hiding = 0;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(hiding);
      if (document.hidden) hiding = setTimeout(() => this.stream.stop(), HIDDEN_MS);
      else this.stream.start();
    });
  }
}

export const app = new App();
app.start();
