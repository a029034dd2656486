// Turns of the conversation as elements. Text is always text, never markup.

import { el, plural, setText } from "./dom.js";

const FENCE = /^```[^\n`]*\n([^]*?)(?:^```[^\S\n]*$|(?![^]))/gm;
const ENDS = { length: "cut off by its length", abort: "aborted", stopped: "stopped" };

/** Text and code blocks of a message, as [isCode, text]. */
function blocksOf(text) {
  const blocks = [];
  let at = 0;
  for (const found of text.matchAll(FENCE)) {
    blocks.push([false, text.slice(at, found.index)], [true, found[1].replace(/\n$/, "")]);
    at = found.index + found[0].length;
  }
  blocks.push([false, text.slice(at)]);
  return blocks.filter(([isCode, part]) => isCode || part.trim());
}

function inline(text) {
  return text.trim().split(/`([^`\n]+)`/).map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

async function copy(button, text) {
  await navigator.clipboard.writeText(text);
  setText(button, "Copied");
}

function codeBlock(text) {
  const button = el("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => copy(button, text));
  return el("div", { class: "code" }, el("pre", {}, el("code", {}, text)), button);
}

/** A message's text; blocks that stay the same are left alone as it grows. */
class TextView {
  constructor() {
    this.element = el("div");
    this.shown = [];
  }

  update(text) {
    const blocks = blocksOf(text);
    blocks.forEach(([isCode, part], i) => {
      const before = this.shown[i];
      if (before && before[0] === isCode && before[1] === part) return;
      const made = isCode ? codeBlock(part) : el("div", { class: "text" }, ...inline(part));
      if (before) this.element.children[i].replaceWith(made);
      else this.element.append(made);
    });
    while (this.element.children.length > blocks.length) this.element.lastChild.remove();
    this.shown = blocks;
  }
}

export function userTurn(text) {
  const view = new TextView();
  view.update(text);
  return el("article", { class: "turn user", "aria-label": "You" }, el("div", { class: "body" }, view.element));
}

/** An answer as it grows.
 *
 * handlers: onResults(texts) with a text for each call, onAgain().
 */
export class AnswerView {
  constructor({ onResults, onAgain }) {
    this.onResults = onResults;
    this.hasEnded = false;
    this.text = new TextView();
    this.thoughts = el("div", { class: "text" });
    this.reasoning = el("details", { class: "reasoning", open: true, hidden: true },
      el("summary", {}, "Reasoning"), this.thoughts);
    this.calls = el("div");
    this.speed = el("span");
    this.again = el("button", { type: "button", class: "link", hidden: true, onclick: onAgain }, "Answer again");
    this.wrong = el("p", { class: "wrong", role: "alert", hidden: true });
    this.element = el("article", { class: "turn assistant", "aria-label": "Assistant" },
      this.reasoning, this.text.element, this.calls, this.wrong,
      el("div", { class: "foot" }, this.speed, this.again));
  }

  update(answer) {
    // A frame that was asked for before the end must not undo what the end shows.
    if (this.hasEnded) return;
    this.reasoning.hidden = !answer.reasoning;
    setText(this.thoughts, answer.reasoning.trim());
    this.text.update(answer.content);
    this.calls.replaceChildren(...answer.calls.map((call) => callCard(call)));
    setText(this.speed, speedOf(answer));
  }

  /** Show how it ended; error: null, or what went wrong. */
  end(answer, error) {
    this.update(answer);
    this.hasEnded = true;
    this.again.hidden = false;
    if (answer.reasoning && answer.content) this.reasoning.open = false;
    if (error !== null) {
      this.wrong.hidden = false;
      setText(this.wrong, error.message);
    } else if (answer.calls.length) this.#askForResults(answer.calls);
  }

  /** Nothing can be done with this answer any more: another turn follows. */
  close() {
    this.again.hidden = true;
    this.calls.querySelectorAll("button").forEach((button) => button.remove());
    this.calls.querySelectorAll("textarea").forEach((field) => { field.readOnly = true; });
  }

  #askForResults(calls) {
    const fields = calls.map((call) => el("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}` }));
    [...this.calls.children].forEach((card, i) => card.append(el("label", {}, "Result", fields[i])));
    const send = el("button", { type: "button", class: "primary" }, calls.length > 1 ? "Send results" : "Send result");
    send.addEventListener("click", () => this.onResults(fields.map((field) => field.value)));
    this.calls.append(send);
  }
}

function callCard({ function: { name, arguments: text } }) {
  return el("div", { class: "call" }, el("span", { class: "name" }, name), el("pre", {}, pretty(text)));
}

/** JSON with line breaks; a text that is not whole yet stays as it is. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function speedOf(answer) {
  if (!answer.tokens) return "";
  const wait = `first after ${Math.round(answer.first - answer.started)} ms`;
  const speed = answer.speed === null ? null : `${answer.speed.toFixed(answer.speed < 10 ? 1 : 0)} tokens/s`;
  return [plural(answer.tokens, "token"), speed, wait, ENDS[answer.finish]].filter(Boolean).join(" · ");
}
