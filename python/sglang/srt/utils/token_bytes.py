"""Bytes of single tokens, for decoders that decode each token independently.

Covers the two decoders that matter for language models: byte-level BPE, and
SentencePiece-style pieces with byte fallback. Other decoders have no such table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_FALLBACK_STEPS = (
    ["Replace", "ByteFallback", "Fuse"],
    ["Replace", "ByteFallback", "Fuse", "Strip"],
)


class TokenBytes:
    """Token id -> bytes, computed on first use.

    The text of a sequence is the UTF-8 decoding of the joined bytes. Leading spaces are
    kept, because an output continues its prompt.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, to_bytes: Callable[[str], bytes]
    ) -> None:
        self._backend = backend
        self._to_bytes = to_bytes
        self._known: dict[int, bytes] = {}

    @classmethod
    def from_backend(cls, backend: tokenizers.Tokenizer) -> TokenBytes | None:
        """Return the table of `backend`, or None if its decoder depends on
        neighbors.
        """
        decoder = json.loads(backend.to_str())["decoder"]
        if decoder is None:
            return None
        if decoder["type"] == "ByteLevel":
            return cls(backend, _byte_level_bytes)
        if decoder["type"] == "Sequence":
            steps = decoder["decoders"]
            if [step["type"] for step in steps] == ["ByteLevel"]:
                return cls(backend, _byte_level_bytes)
            if [step["type"] for step in steps] in _FALLBACK_STEPS:
                pattern = steps[0]["pattern"].get("String")
                if pattern is not None:
                    return cls(backend, _piece_bytes(pattern, steps[0]["content"]))
        return None

    def get(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an unknown id."""
        data = self._known.get(token_id)
        if data is None:
            piece = self._backend.id_to_token(token_id)
            data = b"" if piece is None else self._to_bytes(piece)
            self._known[token_id] = data
        return data


def _byte_level_chars() -> dict[str, int]:
    """Return the byte for each printable character of byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(shifted)})
    return table


_BYTE_BY_CHAR = _byte_level_chars()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_BY_CHAR[char] for char in piece)
    except KeyError:  # an added token, written as plain text
        return piece.encode()


def _piece_bytes(pattern: str, content: str) -> Callable[[str], bytes]:
    def to_bytes(piece: str) -> bytes:
        match = _BYTE_PIECE.fullmatch(piece)
        if match:
            return bytes([int(match[1], 16)])
        return piece.replace(pattern, content).encode()

    return to_bytes
