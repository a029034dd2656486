"""Tokens that can be recomputed from request and position: the oracle of input checks.

Replaces the model's tokens, in tests only, so that a token that reached the wrong
request is noticed on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kv_canary.hashing import MASK64, mix64, mix64_int


def oracle_token(rid_hash: int, position: int, *, vocab_size: int) -> int:
    """The token of request `rid_hash` (`utils.hashing.hash_string`) at `position`:
    mix64(id xor position) as an unsigned number, modulo the vocabulary."""
    return (mix64_int(rid_hash ^ position) & MASK64) % vocab_size


def oracle_tokens(rids_int: Tensor, positions: Tensor, *, vocab_size: int) -> Tensor:
    """`oracle_token` of int64 tensors, [R] int64 on their device."""
    mixed = mix64(rids_int ^ positions)
    low = mixed & 0xFFFFFFFF
    high = (mixed >> 32) & 0xFFFFFFFF
    # Unsigned modulo without 64 unsigned bits: both products stay below 2^63 because
    # a vocabulary has fewer than 2^31 entries.
    folded = (high % vocab_size) * ((1 << 32) % vocab_size) + low
    return torch.remainder(folded, vocab_size)
