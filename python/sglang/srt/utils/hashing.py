"""Stable hashes of strings and files."""

from __future__ import annotations

import hashlib
from pathlib import Path

_HASHED_BYTES = 1 << 22


def hash_string(text: str) -> int:
    """Return blake2b of the UTF-8 bytes: 8 bytes, little endian, signed."""
    value = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(value, "little", signed=True)


def digest(text: str) -> str:
    """Return 128 bits of blake2b of `text` in hexadecimal, as a name for a text that
    may be large.
    """
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hash_file(hashed: hashlib.blake2b, file: Path) -> None:
    """Add the contents of a file to a hash. Other threads run meanwhile."""
    with file.open("rb") as opened:
        while block := opened.read(_HASHED_BYTES):
            hashed.update(block)
