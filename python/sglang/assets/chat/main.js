// The chat: turns of a conversation, sent whole to /v1/chat/completions.

import { Answer } from "./answer.js";
import { ask, eventTexts, getJson, Refused, takeKeyOfAddress } from "./api.js";
import { beforeFrame, byId, el, setText } from "./dom.js";
import { Login } from "./login.js";
import { Settings } from "./settings.js";
import { AnswerView, userTurn } from "./view.js";

const EXAMPLES = [
  "Write a Python function that reverses a string.",
  "What is the capital of France?",
  "Write a haiku about the sea.",
];
const NEAR_END = 80;

class Chat {
  constructor() {
    this.messages = [];
    this.running = null;
    this.latest = null;
    this.settings = new Settings();
    this.log = byId("log");
    this.prompt = byId("prompt");
    this.#listen();
  }

  start() {
    takeKeyOfAddress();
    this.login = new Login(() => this.#greet());
    this.#clear();
    this.#greet();
  }

  async #greet() {
    try {
      const [model] = (await getJson("v1/models")).data;
      byId("facts").replaceChildren("model ", el("b", {}, model.id));
      document.title = `${model.id} · Chat`;
      this.#setStatus("live", "ready");
      byId("inspector").hidden = !(await fetch("canary", { method: "HEAD" })).ok;
    } catch (error) {
      this.#failed(error);
    }
  }

  #clear() {
    this.running?.abort();
    this.messages = [];
    this.latest = null;
    const examples = EXAMPLES.map((text) =>
      el("button", { type: "button", onclick: () => this.say(text) }, text));
    this.log.replaceChildren(el("div", { class: "start" },
      "Nothing is kept: the conversation is in this tab alone.",
      el("div", { class: "examples" }, ...examples)));
    this.prompt.focus();
  }

  /** Send the user's next message. */
  say(text) {
    if (this.running !== null || !text.trim()) return;
    this.#closeLatest();
    if (!this.messages.length) this.log.replaceChildren();
    this.messages.push({ role: "user", content: text });
    this.log.append(userTurn(text));
    this.#answer();
  }

  /** Send the results of the latest answer's calls. */
  #sendResults(calls, texts) {
    if (this.running !== null) return;
    this.#closeLatest();
    calls.forEach((call, i) => {
      this.messages.push({ role: "tool", tool_call_id: call.id, content: texts[i] });
    });
    this.#answer();
  }

  #again() {
    if (this.running !== null) return;
    // An answer that failed at once left no message.
    if (this.messages[this.messages.length - 1].role === "assistant") this.messages.pop();
    this.latest.element.remove();
    this.latest = null;
    this.#answer();
  }

  #closeLatest() {
    this.latest?.close();
    this.latest = null;
  }

  async #answer() {
    const answer = new Answer();
    const view = new AnswerView({
      onResults: (texts) => this.#sendResults(answer.calls, texts), onAgain: () => this.#again(),
    });
    this.latest = view;
    this.log.append(view.element);
    this.#follow(true);
    const abort = new AbortController();
    this.#setRunning(abort);
    let error = null;
    try {
      await this.#stream(answer, view, abort.signal);
    } catch (found) {
      if (abort.signal.aborted) answer.finish = "stopped";
      else error = found;
    }
    const hasAnswered = answer.content || answer.reasoning || answer.calls.length;
    // New chat may have begun meanwhile.
    if (this.latest === view) {
      if (hasAnswered) this.messages.push(answer.message());
      view.end(answer, error);
      this.#follow();
    }
    if (this.running === abort) this.#setRunning(null);
    if (error !== null) this.#failed(error);
  }

  async #stream(answer, view, signal) {
    const system = this.settings.system;
    const body = {
      ...this.settings.fields(),
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const response = await ask("v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
    });
    for await (const text of eventTexts(response.body)) {
      const data = text.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      answer.add(chunk);
      beforeFrame(view, () => {
        const isAtEnd = this.#isAtEnd();
        view.update(answer);
        if (isAtEnd) this.#follow(true);
      });
    }
    throw new TypeError("The connection ended before the answer did.");
  }

  #failed(error) {
    if (error instanceof Refused && error.status === 401) this.login.open(error.message);
    // What fetch throws where nobody answers.
    const isGone = error instanceof TypeError;
    this.#setStatus(isGone ? "trouble" : "live", isGone ? "no answer" : "ready");
  }

  #setRunning(abort) {
    this.running = abort;
    byId("send").hidden = abort !== null;
    byId("stop").hidden = abort === null;
    this.#setStatus("live", abort === null ? "ready" : "answering");
    if (abort === null) this.prompt.focus();
  }

  #setStatus(kind, text) {
    byId("status").className = `status ${kind}`;
    setText(byId("status"), text);
  }

  #isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END;
  }

  /** Scroll to the end, unless the reader has scrolled away from it. */
  #follow(always = false) {
    if (always || this.#isAtEnd()) this.log.scrollTop = this.log.scrollHeight;
  }

  #send() {
    if (this.running !== null) return;
    const text = this.prompt.value;
    this.prompt.value = "";
    this.say(text);
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("new-chat").addEventListener("click", () => this.#clear());
  }
}

export const app = new Chat();
app.start();
