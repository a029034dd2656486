// Requests to the server: the key, answers, and the events of a stream.

// Each page keeps a key of its own: the inspector may need the administrator's.
const KEY = document.documentElement.dataset.key;

/** An answer that is no success. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Take a key out of the address's fragment, which is never sent. */
export function takeKeyOfAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given === null) return;
  setKey(given);
  history.replaceState(null, "", location.pathname + location.search);
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

export async function ask(path, { headers = {}, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const sent = key === null ? headers : { ...headers, Authorization: `Bearer ${key}` };
  // A header could not carry it.
  if (key !== null && !/^[\x21-\x7e]+$/.test(key)) throw new Refused(401, "This is no key.");
  const response = await fetch(path, { cache: "no-store", ...options, headers: sent });
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

/** Yield the texts of a stream's events; onBytes is called whenever something comes. */
export async function* eventTexts(body, onBytes = () => {}) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let parts = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      let text = decoder.decode(value, { stream: true });
      // An event may come in many pieces; its end may be split between two.
      const last = parts.length ? parts[parts.length - 1] : "";
      if (last.endsWith("\n")) text = parts.pop() + text;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        parts.push(text.slice(0, end));
        text = text.slice(end + 2);
        const event = parts.join("");
        parts = [];
        yield event;
      }
      if (text) parts.push(text);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
