"""Tokenization of prompts without blocking the event loop."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sglang.srt.managers.errors import BadRequest

if TYPE_CHECKING:
    from sglang.srt.managers.prompt_request import Limits, PromptRequest
    from sglang.srt.utils.hf_tokenizer import Tokenizer

# Texts from this length on are tokenized in a thread: about a millisecond.
LONG_TEXT_CHARS = 16384
# Normalizers may merge characters (NFC), so a text is refused untokenized only beyond
# this many times the longest possible prompt.
NORMALIZER_SLACK = 4


class PromptTokenizer:
    """Tokenizes prompts; with `tokenizer` None it accepts token ids only."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
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
        if not isinstance(text, str):
            return text
        if self._tokenizer is None:
            raise BadRequest(
                "text needs a tokenizer, but the server runs with "
                "--skip-tokenizer-init; send token ids"
            )
        around = prompt.add_special_tokens
        if len(text) < LONG_TEXT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=around)
        if self._is_too_long(text, limits):
            raise limits.too_long(f"{len(text)} characters", field=prompt.field)
        encode = functools.partial(
            self._tokenizer.encode, text, add_special_tokens=around, in_thread=True
        )
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode)

    def _is_too_long(self, text: str, limits: Limits) -> bool:
        """Whether any tokenization is too long; known only if tokens map to bytes."""
        if self._tokenizer is None or self._tokenizer.token_bytes_table is None:
            return False
        longest = limits.max_req_input_len * self._tokenizer.max_token_chars
        return len(text) > longest * NORMALIZER_SLACK
