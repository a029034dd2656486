"""Tiles and program counts of the canary's Triton launches."""

from __future__ import annotations

from kv_canary.layout import FingerprintMode

BLOCK_TOKENS = 128
"""Elements or new tokens per program if it hashes no whole slots."""

# Words of a tile if whole slots are hashed.
_HASH_TILE = 1024
HASH_SLOTS = 8
"""Slots that a program hashes at a time if it hashes whole slots."""
TARGET_PROGRAMS = 2048
"""Approximate number of programs per launch."""


def verify_block(mode: FingerprintMode) -> tuple[int, int]:
    """Return how many elements a verify program takes, and how many words of each it
    hashes at a time."""
    if mode is FingerprintMode.ALL:
        return HASH_SLOTS, _HASH_TILE // HASH_SLOTS
    return BLOCK_TOKENS, _HASH_TILE


def write_block(mode: FingerprintMode, *, one_token: bool) -> tuple[int, int]:
    """Return how many tokens a write program takes, and how many words of each it
    hashes at a time."""
    if mode in (FingerprintMode.ALL, FingerprintMode.ROTATE):
        block = 1 if one_token else HASH_SLOTS
        return block, _HASH_TILE // block
    return (1 if one_token else BLOCK_TOKENS), 1


def splits_for(rows: int, blocks: int) -> int:
    """Return programs per row, at most `blocks`, for `TARGET_PROGRAMS` in all."""
    wanted = cdiv(TARGET_PROGRAMS, max(rows, 1))
    return max(1, min(1 << (wanted - 1).bit_length(), blocks))


def cdiv(size: int, each: int) -> int:
    """Divide and round up; `triton.cdiv` takes 2 us per call on the host."""
    return -(-size // each)
