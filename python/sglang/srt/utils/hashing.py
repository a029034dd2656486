"""Stable hashes of strings."""

from __future__ import annotations

import hashlib


def hash_string(text: str) -> int:
    """Return blake2b of the UTF-8 bytes: 8 bytes, little endian, signed."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
