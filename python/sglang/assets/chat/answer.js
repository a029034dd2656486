// One answer of the assistant, put together from the chunks of its stream.

/** What has come so far. Fields follow OpenAI's message; times are milliseconds. */
export class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.finish = null;
    this.tokens = 0;
    this.started = performance.now();
    this.first = null;
    this.firstTokens = 0;
    this.latest = null;
  }

  /** Take a chunk of /v1/chat/completions. */
  add(chunk) {
    const choice = chunk.choices?.[0];
    if (choice) {
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
      this.content += content ?? "";
      this.reasoning += reasoning ?? "";
      for (const piece of calls ?? []) this.#addCall(piece);
      this.finish = choice.finish_reason ?? this.finish;
    }
    this.#count(chunk.usage?.completion_tokens ?? 0);
  }

  #addCall({ index, id, function: piece }) {
    this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    const call = this.calls[index].function;
    call.name += piece.name ?? "";
    call.arguments += piece.arguments ?? "";
  }

  #count(tokens) {
    if (tokens <= this.tokens) return;
    this.latest = performance.now();
    if (this.first === null) {
      this.first = this.latest;
      this.firstTokens = tokens;
    }
    this.tokens = tokens;
  }

  /** Tokens per second after the first ones; null where too few have come. */
  get speed() {
    const seconds = (this.latest - this.first) / 1000;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
  }

  /** The message for the next turn of the conversation. */
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) message.tool_calls = this.calls;
    return message;
  }
}
