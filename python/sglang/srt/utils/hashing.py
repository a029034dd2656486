"""Stable hashes: of strings on the host, of int64 tensors on any device."""

from __future__ import annotations

import hashlib

import torch

MASK64 = (1 << 64) - 1


def mix64(x: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's finalizer to int64: wrap-around arithmetic, logical shifts."""
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def mix64_int(x: int) -> int:
    """Return `mix64` of one host integer; the result is signed."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return to_signed64(x ^ (x >> 31))


def to_signed64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def hash_string(text: str) -> int:
    """Return blake2b of the UTF-8 bytes: 8 bytes, little endian, signed."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift logically; torch's `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
