"""Tokenization of texts, and texts of tokens, without blocking the event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from sglang.srt.managers.errors import BadRequest

if TYPE_CHECKING:
    from sglang.srt.managers.prompt_request import Limits, PromptRequest
    from sglang.srt.utils.hf_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Texts from this length on are tokenized in a thread: about a millisecond.
LONG_TEXT_CHARS = 16384
# As many ids are decoded in a thread.
LONG_IDS = 4096
# Normalizers may merge characters (NFC), so a text is refused untokenized only beyond
# this many times the longest possible prompt.
NORMALIZER_SLACK = 4


class PromptTokenizer:
    """Tokenizes prompts; with `tokenizer` None it accepts token ids only.

    Args:
        is_cut: keep the beginning of a prompt that is too long; embeddings are refused.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, is_cut: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_cut = is_cut
        # One thread: long texts must not take the scheduler's cores.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def ids(self, prompt: PromptRequest, limits: Limits) -> list[int]:
        """Return the token ids of `prompt`.

        Raises:
            BadRequest: a text without a tokenizer, or one that is too long.
        """
        text = prompt.prompt
        is_cut = self._is_cut and prompt.input_embeds is None
        if isinstance(text, str):
            if is_cut and self._is_too_long(text, limits):
                text = text[: self._longest_text(limits)]
            (ids,) = await self.encode(
                [text],
                limits,
                add_special_tokens=prompt.add_special_tokens,
                field=prompt.field,
            )
        else:
            ids = text
        if is_cut and len(ids) > limits.max_req_input_len:
            logger.info(
                "a prompt of %d tokens is cut to its first %d (--allow-auto-truncate)",
                len(ids),
                limits.max_req_input_len,
            )
            return ids[: limits.max_req_input_len]
        return ids

    async def encode(
        self,
        texts: Sequence[str],
        limits: Limits,
        *,
        add_special_tokens: bool,
        field: str,
    ) -> list[list[int]]:
        """Return the token ids of every text; `field` of the body holds them.

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

        def encode_all(*, in_thread: bool) -> list[list[int]]:
            return [
                tokenizer.encode(
                    text, add_special_tokens=add_special_tokens, in_thread=in_thread
                )
                for text in texts
            ]

        if sum(map(len, texts)) < LONG_TEXT_CHARS:
            return encode_all(in_thread=False)
        return await self._in_thread(functools.partial(encode_all, in_thread=True))

    async def decode(
        self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """Return the text of every list of ids; there must be a tokenizer."""
        tokenizer = self._tokenizer
        assert tokenizer is not None

        def decode_all(*, in_thread: bool) -> list[str]:
            return [
                tokenizer.decode(
                    ids, skip_special_tokens=skip_special_tokens, in_thread=in_thread
                )
                for ids in lists
            ]

        if sum(map(len, lists)) < LONG_IDS:
            return decode_all(in_thread=False)
        return await self._in_thread(functools.partial(decode_all, in_thread=True))

    async def token_texts(self, lists: Sequence[Sequence[int]]) -> list[list[str]]:
        """Return the text of every single token; there must be a tokenizer."""
        tokenizer = self._tokenizer
        assert tokenizer is not None

        def show_all() -> list[list[str]]:
            return [[tokenizer.token_text(token) for token in ids] for ids in lists]

        if sum(map(len, lists)) < LONG_IDS:
            return show_all()
        return await self._in_thread(show_all)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

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
