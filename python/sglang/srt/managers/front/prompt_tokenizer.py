"""Prompts of chats and texts, and texts of tokens, without blocking the event loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sglang.srt.managers.front.side_jobs import Encoded, encode_texts
from sglang.srt.managers.messages.errors import BadRequest

if TYPE_CHECKING:
    from sglang.srt.managers.front.prompt_request import Limits, PromptRequest
    from sglang.srt.managers.front.side_work import SideWork
    from sglang.srt.utils.hf_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Texts from this length on, of one client's call together, are tokenized in a process:
# about a millisecond.
LONG_TEXT_CHARS = 16384
# As many ids are decoded in a process.
LONG_IDS = 4096
# Of the texts of a call that are tokenized in one turn.
BATCH_CHARS = 1 << 17
# Normalizers may merge characters (NFC), so a text is refused untokenized only beyond
# this many times the longest possible prompt.
NORMALIZER_SLACK = 4


class PromptTokenizer:
    """Tokenizes prompts; with `tokenizer` None it accepts token ids only.

    Args:
        side_work: with the same tokenizer.
        is_cut: keep the beginning of a prompt that is too long; embeddings are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        side_work: SideWork,
        *,
        is_cut: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._side_work = side_work
        self._is_cut = is_cut

    async def render(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> str:
        """Return the prompt of a conversation, as `TemplateManager.render` makes it.

        Always in a process: only running a template shows what it costs.

        Raises:
            BadRequest: names the message and the field.
        """
        raw = await self._side_work.call(
            "render", field="messages", messages=messages, **options
        )
        return msgspec.json.decode(raw, type=str)

    async def ids(
        self, prompts: Sequence[PromptRequest], limits: Limits
    ) -> list[list[int]]:
        """Return the token ids of all prompts of a call.

        Raises:
            BadRequest: a text without a tokenizer, or one that is too long.
        """
        found: list[list[int]] = []
        for batch in _batches(prompts):
            first = batch[0]
            texts = [
                self._cut_text(p.prompt, limits)
                for p in batch
                if isinstance(p.prompt, str)
            ]
            if not texts:
                found += [
                    p.prompt if p.input_embeds else self._cut_ids(p.prompt, limits)
                    for p in batch
                    if not isinstance(p.prompt, str)
                ]
                continue
            encoded = await self.encode(
                texts,
                limits,
                add_special_tokens=first.add_special_tokens,
                field=first.field,
            )
            longest = max(encoded.counts)
            if longest > limits.max_req_input_len and not self._is_cut:
                # Nobody needs its ids, which are many.
                raise limits.too_long(longest, field=first.field)
            lists = msgspec.json.decode(encoded.ids, type=list[list[int]])
            found += [self._cut_ids(ids, limits) for ids in lists]
        return found

    def _cut_text(self, text: str, limits: Limits) -> str:
        """Cut a text that is longer than any prompt, where that is asked for."""
        if self._is_cut and self._is_too_long(text, limits):
            return text[: self._longest_text(limits)]
        return text

    def _cut_ids(self, ids: list[int], limits: Limits) -> list[int]:
        longest = limits.max_req_input_len
        if not self._is_cut or len(ids) <= longest:
            return ids
        logger.info(
            "a prompt of %d tokens is cut to its first %d (--allow-auto-truncate)",
            len(ids),
            longest,
        )
        return ids[:longest]

    async def encode(
        self,
        texts: Sequence[str],
        limits: Limits,
        *,
        add_special_tokens: bool,
        field: str,
        with_strings: bool = False,
    ) -> Encoded:
        """Tokenize all texts; `field` of the body holds them.

        Raises:
            BadRequest: there is no tokenizer, or a text is too long for any prompt.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise BadRequest(
                "text needs a tokenizer, but the server runs with "
                "--skip-tokenizer-init; send token ids"
            )
        for text in texts:
            if len(text) >= LONG_TEXT_CHARS and self._is_too_long(text, limits):
                raise limits.too_long(
                    limits.max_req_input_len + 1,
                    field=field,
                    size=f"{len(text)} characters",
                )
        options = {
            "add_special_tokens": add_special_tokens,
            "with_strings": with_strings,
        }
        if sum(map(len, texts)) < LONG_TEXT_CHARS:
            return encode_texts(tokenizer, texts, **options)
        raw = await self._side_work.call("encode", field=field, texts=texts, **options)
        return msgspec.json.decode(raw, type=Encoded)

    async def decode(
        self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """Return the text of every list of ids; there must be a tokenizer."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        if sum(map(len, lists)) < LONG_IDS:
            return [
                tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
                for ids in lists
            ]
        raw = await self._side_work.call(
            "decode",
            field="tokens",
            lists=lists,
            skip_special_tokens=skip_special_tokens,
        )
        return msgspec.json.decode(raw, type=list[str])

    def _is_too_long(self, text: str, limits: Limits) -> bool:
        """Whether any tokenization is too long; known only if tokens map to bytes."""
        if self._tokenizer is None or self._tokenizer.token_bytes_table is None:
            return False
        return len(text) > self._longest_text(limits)

    def _longest_text(self, limits: Limits) -> int:
        """Characters beyond which no text is a prompt that fits."""
        assert self._tokenizer is not None
        longest = limits.max_req_input_len * self._tokenizer.max_token_chars
        return longest * NORMALIZER_SLACK


def _batches(prompts: Sequence[PromptRequest]) -> Iterator[list[PromptRequest]]:
    """Prompts of a call that are tokenized together: other clients take turns between
    two of many."""
    batch: list[PromptRequest] = []
    chars = 0
    for prompt in prompts:
        size = len(prompt.prompt) if isinstance(prompt.prompt, str) else 0
        is_alike = bool(batch) and _kind(prompt) == _kind(batch[0])
        if batch and (not is_alike or chars + size > BATCH_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append(prompt)
        chars += size
    if batch:
        yield batch


def _kind(prompt: PromptRequest) -> tuple[bool, bool]:
    return isinstance(prompt.prompt, str), prompt.add_special_tokens
