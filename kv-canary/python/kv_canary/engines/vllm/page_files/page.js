"use strict";

// Ranks and their incidents, asked every few seconds. All text of the server goes in as
// text, never as markup.
const PERIOD_MS = 5000;
const BASE = location.pathname.replace(/\/$/, "");
const by = (id) => document.getElementById(id);
let key = sessionStorage.getItem("kv_canary_key") || "";

async function ask(path) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(`${BASE}/${path}`, { headers });
  by("key").hidden = answer.status !== 401;
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.error || `status ${answer.status}`);
  }
  return answer;
}

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

function rankRow(rank) {
  const row = document.createElement("tr");
  if (!rank.attached) {
    row.append(element("td", rank.rank), element("td", "NOTHING IS CHECKED: see the log", "bad"));
    return row;
  }
  const found = Object.entries(rank.violations).map(([reason, n]) => `${reason} ${n}`);
  const cells = [
    rank.rank,
    new Date(rank.since * 1000).toISOString().slice(0, 19) + "Z",
    rank.mode,
    rank.real_data,
    `${rank.verified_requests.toLocaleString()} of ${rank.requests.toLocaleString()}`,
    rank.forwards.toLocaleString(),
    rank.verified_slots.toLocaleString(),
    rank.recorded_slots.toLocaleString(),
  ];
  row.append(...cells.map((cell) => element("td", cell)));
  row.append(element("td", found.join(", ") || "none", found.length ? "bad" : ""));
  return row;
}

function incidentLine(rank, incident) {
  const first = incident.violations[0];
  const more = incident.violations.length - 1 + incident.dropped;
  const where = `request ${first.rid}, position ${first.position}, slot ${first.slot}`;
  const text = `${incident.time}  rank ${rank.rank}  ${first.diagnosis}: ${where}`;
  const line = document.createElement("li");
  const button = element("button", more ? `${text}, and ${more} more` : text);
  button.addEventListener("click", () => show(rank.rank, incident.number));
  line.append(button);
  return line;
}

async function show(rank, number) {
  const pre = by("explained");
  try {
    pre.textContent = await (await ask(`explain/${rank}/${number}`)).text();
  } catch (error) {
    pre.textContent = error.message;
  }
  pre.hidden = false;
  pre.focus();
}

async function refresh() {
  try {
    const { ranks } = await (await ask("report")).json();
    const checked = ranks.filter((rank) => rank.attached && rank.forwards).length;
    by("state").textContent = `${checked} of ${ranks.length} ranks checked`;
    by("state").className = checked === ranks.length ? "" : "bad";
    by("ranks").replaceChildren(...ranks.map(rankRow));
    const lines = ranks.flatMap((rank) =>
      (rank.incidents || []).map((incident) => [rank, incident]));
    lines.sort((a, b) => b[1].time.localeCompare(a[1].time) || b[1].number - a[1].number);
    by("incidents").replaceChildren(...lines.map(([rank, one]) => incidentLine(rank, one)));
    by("none").hidden = lines.length > 0;
  } catch (error) {
    by("state").textContent = error.message;
    by("state").className = "bad";
  }
}

by("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = by("secret").value;
  sessionStorage.setItem("kv_canary_key", key);
  refresh();
});
refresh();
setInterval(() => document.hidden || refresh(), PERIOD_MS);
