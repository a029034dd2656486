// The stream of named events, through lost connections.

import { Refused, ask, eventTexts } from "./api.js";

const RETRY_MS = [1000, 2000, 5000, 10000];
// A server that says nothing for so long is gone: its events come several times a second.
const SILENCE_MS = 30000;

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
      for await (const event of eventTexts(response.body, heard)) {
        await this.#handle(event);
        if (this.abort !== abort) return;
      }
      throw new Error("The connection ended.");
    } catch (error) {
      if (this.abort !== abort) return;
      this.#retry(error);
    } finally {
      clearTimeout(silence);
      abort.abort();
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
