"""Stable hashes of strings."""

from __future__ import annotations

import hashlib


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
