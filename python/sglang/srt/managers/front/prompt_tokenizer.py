"""Tokenizes chats and texts, and decodes tokens, without blocking the event loop."""

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

# Texts of one call with at least this total length are tokenized in a separate process;
# this length takes about a millisecond.
LONG_TEXT_CHARS = 16384
# The same limit for decoding, in ids.
LONG_IDS = 4096
# Length of a call's texts that are tokenized in one turn.
BATCH_CHARS = 1 << 17
# Normalizers may merge characters (NFC), so a text is rejected without tokenizing only
# if it exceeds the longest possible prompt by this factor.
NORMALIZER_SLACK = 4


class PromptTokenizer:
    """Tokenizes prompts; accepts token ids only if `tokenizer` is None.

    Args:
        side_work: side work that uses the same tokenizer.
        is_cut: truncate prompts that are too long; embeddings are still rejected.
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

        Always runs in a separate process, because a template's cost is known only by
        running it.

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
            BadRequest: there is no tokenizer for a text, or a text is too long.
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
                # Its many ids are not needed.
                raise limits.too_long(longest, field=first.field)
            lists = msgspec.json.decode(encoded.ids, type=list[list[int]])
            found += [self._cut_ids(ids, limits) for ids in lists]
        return found

    def _cut_text(self, text: str, limits: Limits) -> str:
        """Truncate a text that is longer than any prompt, if truncation is enabled."""
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
        """Return the text of every list of ids; requires a tokenizer."""
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
        """Whether every tokenization of the text is too long; known only if tokens map
        to bytes.
        """
        if self._tokenizer is None or self._tokenizer.token_bytes_table is None:
            return False
        return len(text) > self._longest_text(limits)

    def _longest_text(self, limits: Limits) -> int:
        """Number of characters beyond which no text fits."""
        assert self._tokenizer is not None
        longest = limits.max_req_input_len * self._tokenizer.max_token_chars
        return longest * NORMALIZER_SLACK


def _batches(prompts: Sequence[PromptRequest]) -> Iterator[list[PromptRequest]]:
    """Yield groups of prompts that are tokenized together; other clients take turns
    between groups.
    """
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
