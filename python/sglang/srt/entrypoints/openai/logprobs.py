"""Logprobs in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.errors import BadRequest
from sglang.srt.managers.io_struct import LogprobDelta, TokenLogprob
from sglang.srt.utils.hf_tokenizer import Tokenizer


def need_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """OpenAI's endpoints speak in text.

    Raises:
        BadRequest: the server runs without a tokenizer.
    """
    if tokenizer is None:
        raise BadRequest(
            "this endpoint needs a tokenizer, but the server runs with "
            "--skip-tokenizer-init; use /generate"
        )
    return tokenizer


def chat_logprobs(tokenizer: Tokenizer, delta: LogprobDelta) -> dict[str, Any]:
    """`choices[].logprobs` of `/v1/chat/completions` for the tokens of `delta`."""
    tops: Sequence[Sequence[TokenLogprob]] = delta.output_top or [
        [] for _ in delta.output_token
    ]
    content = []
    for entry, top in zip(delta.output_token, tops, strict=True):
        shown = _chat_token(tokenizer, entry)
        shown["top_logprobs"] = [_chat_token(tokenizer, other) for other in top]
        content.append(shown)
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    logprob, token_id = entry
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode(errors="replace"),
        "logprob": logprob,
        "bytes": list(data),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of `/v1/completions`; offsets run on from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer, *, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def skip_text(self, text: str) -> None:
        """Text that is shown before the first token."""
        self._offset += len(text)

    def add(self, delta: LogprobDelta, *, with_input: bool) -> dict[str, Any]:
        """The object for the tokens of `delta`, prompt tokens first where asked for."""
        tokens = list(delta.output_token)
        tops: list[list[TokenLogprob] | None] = list(delta.output_top)
        tops += [None] * (len(tokens) - len(tops))
        if with_input and delta.input_token is not None:
            tokens = [*delta.input_token, *tokens]
            tops = [*(delta.input_top or [None] * len(delta.input_token)), *tops]
        texts = [self._tokenizer.token_text(token_id) for _, token_id in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [logprob for logprob, _ in tokens],
            "top_logprobs": [
                self._top_dict(entry, top)
                for entry, top in zip(tokens, tops, strict=True)
            ]
            if self._top
            else None,
            "text_offset": offsets,
        }

    def _top_dict(
        self, entry: TokenLogprob, top: Sequence[TokenLogprob] | None
    ) -> dict[str, float | None] | None:
        """The most likely tokens, and the one that was taken."""
        if top is None:
            return None
        return {
            self._tokenizer.token_text(token_id): logprob
            for logprob, token_id in (*top, entry)
        }
