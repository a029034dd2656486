"""Tiles of the grouped products, from shapes known on the host.

The table was chosen by reasoning about an H200, not swept; no device is queried.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

BLOCK_K = 64
"""Used by every configuration: with one order of the sum over K, a token's result does
not depend on the number of tokens."""

_SHARED_BYTES = 225 * 1024
_MAX_STAGES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTile:
    """Shape of one launch.

    Fields:
        block_m: rows of one expert per program, that is, assignments to it.
        block_n: outputs per program.
        stages: tiles in flight per program.
        warps: warps per program.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int


@functools.cache
def lookup(
    *, assignments: int, experts: int, outputs: int, gated: bool, itemsize: int
) -> MoeTile:
    """Return the tiles for `pairs` (token, expert) pairs spread over `experts`.

    Args:
        outputs: columns of the result.
        gated: each output has two rows of the weight.
        itemsize: bytes of an element.
    """
    block_m = block_rows(assignments=assignments, experts=experts)
    # The weight is the tall operand of the matrix units, which take 64 rows of it.
    block_n = 64 if gated or block_m == 16 else 128
    while block_n > 16 and block_n >= 2 * outputs:
        block_n //= 2
    weight_rows = block_n * (2 if gated else 1)
    tile_bytes = itemsize * BLOCK_K * (weight_rows + block_m)
    # Two programs on a multiprocessor hide each other's tails.
    stages = max(2, min(_MAX_STAGES, _SHARED_BYTES // 2 // tile_bytes))
    warps = 8 if weight_rows * block_m >= 128 * 128 else 4
    return MoeTile(block_m=block_m, block_n=block_n, stages=stages, warps=warps)


def block_rows(*, assignments: int, experts: int) -> int:
    """Return the rows of a block: about as many as an expert has, so little is
    padding."""
    average = assignments / experts
    for rows in (16, 32, 64):
        if average <= rows:
            return rows
    return 128


def max_blocks(*, assignments: int, experts: int, block_m: int) -> int:
    """Return enough blocks for any spread of the assignments over the experts."""
    touched = min(assignments, experts)
    return (assignments + touched * (block_m - 1)) // block_m
