// What the form asks of the server: fields of a chat request.

import { byId, setText } from "./dom.js";

const STORE = "chat-settings";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "seed"];
const TEXTS = ["system", "stop", "tools"];

/** A setting that cannot be sent. */
export class WrongSetting extends Error {}

/** The settings form; the tab keeps what is in it. */
export class Settings {
  constructor() {
    this.form = byId("settings");
    const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    for (const name of [...NUMBERS, ...TEXTS]) this.form.elements[name].value = kept[name] ?? "";
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", () => this.#keep());
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  /** Fields of a request, without those left empty.
   *
   * Throws WrongSetting, which the form then shows.
   */
  fields() {
    try {
      const fields = { ...this.#numbers(), ...this.#tools() };
      const stop = this.form.elements.stop.value;
      if (stop) fields.stop = [stop];
      this.#say("");
      return fields;
    } catch (error) {
      this.#say(error.message);
      throw error;
    }
  }

  #numbers() {
    const fields = {};
    for (const name of NUMBERS) {
      const field = this.form.elements[name];
      if (!field.validity.valid) throw new WrongSetting(`${labelOf(field)}: ${field.validationMessage}`);
      if (field.value !== "") fields[name] = Number(field.value);
    }
    return fields;
  }

  #tools() {
    const text = this.form.elements.tools.value.trim();
    if (!text) return {};
    try {
      return { tools: JSON.parse(text) };
    } catch (error) {
      throw new WrongSetting(`Tools are not JSON: ${error.message}`);
    }
  }

  #say(text) {
    const place = byId("settings-wrong");
    place.hidden = text === "";
    setText(place, text);
  }

  #keep() {
    const names = [...NUMBERS, ...TEXTS];
    const values = Object.fromEntries(names.map((name) => [name, this.form.elements[name].value]));
    sessionStorage.setItem(STORE, JSON.stringify(values));
  }
}

const labelOf = (field) => field.labels[0].firstChild.textContent.trim();
