// The dialog that asks for a key.

import { forgetKey, hasKey, setKey } from "./api.js";
import { byId, el, setText } from "./dom.js";

/** A dialog, and a button with the id `forget-key` that the page has.
 *
 * onKey() is called once a key was given.
 */
export class Login {
  constructor(onKey) {
    this.why = el("p", { id: "login-why" });
    this.field = el("input", { id: "login-key", type: "password", autocomplete: "current-password", required: true });
    const form = el("form", { id: "login-form", onsubmit: (event) => this.#take(event, onKey) },
      el("h2", { id: "login-title" }, "Key"), this.why,
      // Password managers want a name beside a password.
      el("input", { type: "text", autocomplete: "username", value: "sglang", hidden: true }),
      el("label", {}, "API key ", this.field),
      el("p", { class: "quiet" }, "It stays in this tab and is sent as a header."),
      el("button", { type: "submit", class: "primary" }, "Open"));
    this.dialog = el("dialog", { id: "login", "aria-labelledby": "login-title" }, form);
    document.body.append(this.dialog);
    this.forget = byId("forget-key");
    this.forget.hidden = !hasKey();
    this.forget.addEventListener("click", () => {
      forgetKey();
      location.reload();
    });
  }

  /** Ask for another key. */
  open(why) {
    forgetKey();
    this.forget.hidden = true;
    setText(this.why, why);
    if (!this.dialog.open) this.dialog.showModal();
  }

  #take(event, onKey) {
    event.preventDefault();
    setKey(this.field.value.trim());
    this.field.value = "";
    this.dialog.close();
    this.forget.hidden = false;
    onKey();
  }
}
