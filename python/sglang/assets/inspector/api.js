// Requests to the server: the key, answers, and the stream of events.

const KEY = "inspector-key";
const RETRY_MS = [1000, 2000, 5000, 10000];
// A server that says nothing for so long is gone: its events come several times a second.
const SILENCE_MS = 30000;

/** An answer that is no success. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A key in the fragment of the address, which is never sent; it is taken out of it. */
export function takeKeyOfAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given === null) return;
  sessionStorage.setItem(KEY, given);
  history.replaceState(null, "", location.pathname + location.search);
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  // Not a header, which could not carry it.
  if (key !== null && !/^[\x21-\x7e]+$/.test(key)) throw new Refused(401, "This is no key.");
  const response = await fetch(path, { headers, cache: "no-store", ...options });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Something between here and the server has answered.
  }
  throw new Refused(response.status, message);
}

export async function getJson(path) {
  return (await ask(path)).json();
}

/** Events of `path` from now on, through lost connections, until `stop`.
 *
 * handlers: onEvent(name, data), onLost(error, seconds), onRefused(error).
 */
export class EventStream {
  constructor(path, handlers) {
    this.path = path;
    this.handlers = handlers;
    this.abort = null;
    this.failures = 0;
    this.timer = 0;
  }

  start() {
    if (this.abort === null) this.#connect();
  }

  stop() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  async #connect() {
    const abort = new AbortController();
    this.abort = abort;
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    try {
      heard();
      const response = await ask(this.path, { signal: abort.signal });
      await this.#read(response.body.getReader(), abort, heard);
      throw new Error("The connection ended.");
    } catch (error) {
      if (this.abort !== abort) return;
      this.#retry(error);
    } finally {
      clearTimeout(silence);
      abort.abort();
    }
  }

  async #read(reader, abort, heard) {
    const decoder = new TextDecoder();
    let parts = [];
    for (;;) {
      const { value, done } = await reader.read();
      if (done || this.abort !== abort) return;
      heard();
      let text = decoder.decode(value, { stream: true });
      // An event may come in many pieces; an end may be split between two.
      const last = parts.length ? parts[parts.length - 1] : "";
      if (last.endsWith("\n")) text = parts.pop() + text;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        parts.push(text.slice(0, end));
        text = text.slice(end + 2);
        await this.#handle(parts.join(""));
        parts = [];
        if (this.abort !== abort) return;
      }
      if (text) parts.push(text);
    }
  }

  async #handle(event) {
    const found = /^event: (\w+)\ndata: ([^]*)$/.exec(event);
    if (found === null) return;
    this.failures = 0;
    await this.handlers.onEvent(found[1], JSON.parse(found[2]));
  }

  #retry(error) {
    const isFinal = error instanceof Refused && [401, 403, 404].includes(error.status);
    if (isFinal) {
      this.abort = null;
      this.handlers.onRefused(error);
      return;
    }
    const wait = RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)];
    this.failures += 1;
    this.handlers.onLost(error, wait / 1000);
    this.timer = setTimeout(() => this.#connect(), wait);
  }
}
