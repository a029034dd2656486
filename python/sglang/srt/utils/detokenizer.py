"""Incremental decoding of token ids to text, at a constant cost per token.

Never emits a replacement character for an incomplete character. Knows nothing about
requests or stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.utils.hf_tokenizer import Tokenizer
    from sglang.srt.utils.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
# More tokens than one character spans: after this many, an invalid character is final.
MAX_PENDING_TOKENS = 8


class _Decoder(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class IncrementalDetokenizer:
    """Decodes one growing output.

    The pieces returned by `push` and finally `finish` join to the decoding of all
    tokens at once. Special tokens are dropped if `skip_special_tokens` is set.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True
    ) -> None:
        table = tokenizer.token_bytes_table
        self._decoder: _Decoder = (
            _WindowDecoder(tokenizer) if table is None else _ByteDecoder(table)
        )
        self._dropped = tokenizer.special_ids if skip_special_tokens else frozenset()

    def push(self, token: int) -> str:
        """Return the text that is final after `token`, which may be empty."""
        return self.push_many((token,))

    def push_many(self, tokens: Sequence[int]) -> str:
        """Push several tokens, in order."""
        if self._dropped:
            tokens = [token for token in tokens if token not in self._dropped]
        return self._decoder.push(tokens) if tokens else ""

    def finish(self) -> str:
        """Return the remaining text; U+FFFD replaces an incomplete character."""
        return self._decoder.finish()


class _ByteDecoder:
    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._table.get, token_ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decodes new tokens after some old ones, for decoders that depend on neighbors.

    `_tokens[:_n_emitted]` is context whose text has been returned; the rest is pending.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._n_emitted = 0

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, token_ids))

    def finish(self) -> str:
        return self._advance(self._decode(self._tokens))

    def _push_one(self, token_id: int) -> str:
        self._tokens.append(token_id)
        text = self._decode(self._tokens)
        pending = len(self._tokens) - self._n_emitted
        if text.endswith(REPLACEMENT) and pending < MAX_PENDING_TOKENS:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        known = self._decode(self._tokens[: self._n_emitted])
        del self._tokens[: self._n_emitted]
        self._n_emitted = len(self._tokens)
        return text[len(known) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
