"""Logprobs in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.managers.messages.io_struct import LogprobDelta, TokenLogprob
from sglang.srt.utils.detokenizer import IncrementalDetokenizer
from sglang.srt.utils.hf_tokenizer import Tokenizer

# Number of tokens of a long answer that are encoded at once.
SLICE_TOKENS = 256


def need_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return `tokenizer`, which OpenAI's endpoints require.

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
    """Return `choices[].logprobs` of `/v1/chat/completions` for `delta`'s tokens."""
    count = len(delta.output_token)
    content: Any = (
        _chat_tokens(tokenizer, delta, 0, count)
        if count <= SLICE_TOKENS
        else json_list(encoded_tokens(tokenizer, delta))
    )
    return {"content": content, "refusal": None}


def encoded_tokens(tokenizer: Tokenizer, delta: LogprobDelta) -> list[bytes]:
    """Return the entries of `delta`'s tokens for `json_list`.

    They are encoded in slices: as objects they would take hundreds of bytes each, and
    encoding all of them would hold the interpreter for too long.
    """
    count = len(delta.output_token)
    return [
        msgspec.json.encode(_chat_tokens(tokenizer, delta, at, at + SLICE_TOKENS))[1:-1]
        for at in range(0, count, SLICE_TOKENS)
    ]


def json_list(slices: Iterable[bytes]) -> msgspec.Raw:
    """Join slices of encoded entries into a list."""
    return msgspec.Raw(b"[" + b",".join(slices) + b"]")


def _chat_tokens(
    tokenizer: Tokenizer, delta: LogprobDelta, begin: int, end: int
) -> list[dict[str, Any]]:
    """Return the entries of the tokens from `begin` to `end`."""
    chosen = delta.output_token[begin:end]
    tops: Sequence[Sequence[TokenLogprob]] = delta.output_top[begin:end] or [
        [] for _ in chosen
    ]
    content = []
    for entry, top in zip(chosen, tops, strict=True):
        shown = _chat_token(tokenizer, entry)
        shown["top_logprobs"] = [_chat_token(tokenizer, other) for other in top]
        content.append(shown)
    return content


def _chat_token(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    logprob, token_id = entry
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode(errors="replace"),
        "logprob": logprob,
        "bytes": list(data),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of `/v1/completions`; offsets continue from chunk to chunk.

    An offset is the index in the shown text at which a token's own text begins. Tokens
    without text, and all parts of a character except the last, do not advance it.

    Args:
        top: number of alternatives per token.
        skip_special_tokens: as for the text of the output.
        prompt_text: text shown before the output; empty without `echo`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        top: int,
        skip_special_tokens: bool = True,
        prompt_text: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._prompt_text = prompt_text
        self._output_offset = len(prompt_text)
        self._output = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens
        )

    def add(self, delta: LogprobDelta, *, with_input: bool) -> dict[str, Any]:
        """Return the object for the tokens of `delta`, with prompt tokens first."""
        tokens = list(delta.output_token)
        tops: list[list[TokenLogprob] | None] = list(delta.output_top)
        tops += [None] * (len(tokens) - len(tops))
        offsets = self._output_offsets([token_id for _, token_id in tokens])
        if with_input and delta.input_token is not None:
            inputs = delta.input_token
            tokens = [*inputs, *tokens]
            tops = [*(delta.input_top or [None] * len(inputs)), *tops]
            offsets = [*self._input_offsets([i for _, i in inputs]), *offsets]
        return {
            "tokens": [self._name(token_id) for _, token_id in tokens],
            "token_logprobs": [logprob for logprob, _ in tokens],
            "top_logprobs": [
                self._top_dict(entry, top)
                for entry, top in zip(tokens, tops, strict=True)
            ]
            if self._top
            else None,
            "text_offset": offsets,
        }

    def _output_offsets(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._output_offset)
            self._output_offset += len(self._output.push(token_id))
        return offsets

    def _input_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Return offsets in the shown prompt, which may differ from the decoded one."""
        detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        offsets, offset = [], 0
        for token_id in token_ids:
            offsets.append(offset)
            piece = detokenizer.push(token_id)
            is_special = token_id in self._tokenizer.special_ids
            offset += self._width_in_prompt(piece, offset, is_special=is_special)
        return offsets

    def _width_in_prompt(self, piece: str, offset: int, *, is_special: bool) -> int:
        """Return how many characters of `piece` match the prompt at `offset`.

        Tokenizers add special tokens, and some add a leading space.
        """
        if self._prompt_text.startswith(piece, offset):
            return len(piece)
        if is_special:
            return 0
        is_space_added = piece[:1] == " " and self._prompt_text.startswith(
            piece[1:], offset
        )
        return len(piece) - is_space_added

    def _name(self, token_id: int) -> str:
        """Return the text of a token, or OpenAI's form of its bytes.

        Bytes are used for a token that is part of a character, because distinct tokens
        need distinct names.
        """
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _top_dict(
        self, entry: TokenLogprob, top: Sequence[TokenLogprob] | None
    ) -> dict[str, float | None] | None:
        """Return the most likely tokens and the sampled one."""
        if top is None:
            return None
        return {self._name(token_id): logprob for logprob, token_id in (*top, entry)}
