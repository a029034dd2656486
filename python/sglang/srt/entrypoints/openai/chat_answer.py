"""The answer of `/v1/chat/completions`: chunks of a stream, or one body."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.openai.common import (
    UsageCounter,
    finish_name,
    last_hidden_state,
    make_id,
    matched_stop,
)
from sglang.srt.entrypoints.openai.logprobs import chat_logprobs
from sglang.srt.function_call.core_types import CallDelta
from sglang.srt.function_call.function_call_parser import Call
from sglang.srt.managers.front.prompt_request import PromptRequest
from sglang.srt.managers.front.request_state import Update
from sglang.srt.parser.output_parser import (
    OutputFormat,
    OutputParser,
    ParsedOutput,
    Piece,
)
from sglang.srt.parser.reasoning_detector import Reasoning
from sglang.srt.utils.hf_tokenizer import Tokenizer

# Every delta has these keys, as in SGLang, because clients read them without checking.
_NO_DELTA: dict[str, Any] = dict.fromkeys(
    ("role", "content", "reasoning_content", "tool_calls")
)


class ChatAnswer:
    """Builds the chunks of a stream, or the one body without a stream.

    Args:
        form: format of the outputs, for parsing.
        with_usage: whether to report usage in every chunk.
        shows_reasoning: whether to include the reasoning.
    """

    def __init__(
        self,
        front: Front,
        tokenizer: Tokenizer,
        prompt: PromptRequest,
        form: OutputFormat,
        *,
        model: str | None,
        with_usage: bool,
        shows_reasoning: bool = True,
    ) -> None:
        self.usage = UsageCounter(
            n=prompt.sampling_params.n,
            report_cached=front.server_args.enable_cache_report,
        )
        self._tokenizer = tokenizer
        self._with_logprobs = prompt.return_logprob
        self._with_token_ids = prompt.keeps_prompt_ids
        self._shows_reasoning = shows_reasoning
        self._parsers = [OutputParser(form) for _ in range(prompt.sampling_params.n)]
        self._id = make_id("chatcmpl")
        self._created = int(time.time())
        self._model = model or front.model_name
        self._with_usage = with_usage

    def body(
        self,
        kind: str,
        choices: Sequence[dict[str, Any]],
        *,
        usage: dict[str, Any] | None,
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }

    def chunk(
        self, choices: Sequence[dict[str, Any]], *, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if self._with_usage:
            usage = self.usage.as_dict()
        return self.body("chat.completion.chunk", choices, usage=usage)

    def choice(self, update: Update) -> dict[str, Any]:
        """Return a complete choice."""
        return {
            "index": update.index,
            "message": _message(ParsedOutput.of(self._pieces(update))),
            "logprobs": self._logprobs(update),
            "finish_reason": self._finish(update),
            "matched_stop": matched_stop(update.finish_reason),
            **self._token_ids(update),
            **last_hidden_state(update),
        }

    def prompt_ids(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Return the body's field with the prompt's token ids, if requested."""
        if not self._with_token_ids:
            return {}
        return {"prompt_token_ids": updates[0].prompt_ids}

    def role_chunks(self, news: Sequence[Update]) -> list[dict[str, Any]]:
        """Return the first chunk of every choice; `news` are the first updates."""
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self.chunk([self._delta(i, delta)]) for i, _ in enumerate(self._parsers)
        ]
        chunks[0] |= self.prompt_ids(news)
        return chunks

    def delta_chunks(self, update: Update) -> list[dict[str, Any]]:
        """Return a chunk for each new piece, and a last one with the finish reason. The
        first has the logprobs and ids of all new tokens.
        """
        deltas = list(map(_delta_fields, self._pieces(update)))
        logprobs, token_ids = self._logprobs(update), self._token_ids(update)
        if (logprobs is not None or token_ids) and not deltas:
            deltas = [{"content": ""}]
        shown = [self._delta(update.index, delta) for delta in deltas]
        if shown:
            shown[0]["logprobs"] = logprobs
            shown[0] |= token_ids
        if update.finish_reason is not None:
            last = self._delta(update.index, last_hidden_state(update))
            last["finish_reason"] = self._finish(update)
            last["matched_stop"] = matched_stop(update.finish_reason)
            shown.append(last)
        return [self.chunk([delta]) for delta in shown]

    def _pieces(self, update: Update) -> list[Piece]:
        parser = self._parsers[update.index]
        pieces = parser.push(update.text)
        if update.finish_reason is not None:
            pieces += parser.finish()
        if self._shows_reasoning:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, Reasoning)]

    def _finish(self, update: Update) -> str | None:
        name = finish_name(update.finish_reason)
        has_calls = self._parsers[update.index].has_calls
        return "tool_calls" if name == "stop" and has_calls else name

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": index,
            "delta": _NO_DELTA | delta,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
        }

    def _token_ids(self, update: Update) -> dict[str, Any]:
        return {"token_ids": update.output_ids} if self._with_token_ids else {}

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        if not self._with_logprobs or update.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, update.logprobs)


def _message(parsed: ParsedOutput) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": (parsed.text or None) if parsed.calls else parsed.text,
        "refusal": None,
        "reasoning_content": parsed.reasoning or None,
        "tool_calls": list(map(_call_dict, parsed.calls)) or None,
    }


def _delta_fields(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"content": piece}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    return {"tool_calls": [_call_delta(piece)]}


def _call_delta(delta: CallDelta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    call = Call(delta.call_id or "", delta.name, delta.arguments)
    return {"index": delta.index, **_call_dict(call)}


def _call_dict(call: Call) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
