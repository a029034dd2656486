"""The draw by inverse CDF inside Triton kernels: which split of a row, and which id of
that split. Sums are float64."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MAX_ROWS = 4096
"""Rows of a launch at most."""
MAX_BLOCK = 8192
"""Ids of a split at most."""
MAX_SPLITS = 128
"""Splits of a row at most."""


@triton.jit
def row_of(rows, program):
    """Return the row that a program takes: its own, or what `rows` names for it; that
    is negative if there is none."""
    row = program.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + program)
    return row


@triton.jit
def find_split(weights, noise, SPLITS: tl.constexpr):
    """Return the first split whose cumulative weight exceeds `noise` times the total,
    and what of that remains for it.

    Args:
        weights: [block of at least SPLITS] float64, 0 past the last split.
        noise: float64 in [0, 1).
    """
    ends = tl.cumsum(weights, axis=0)
    target = noise * tl.max(ends, axis=0)
    split = tl.minimum(tl.sum((ends <= target).to(tl.int32), axis=0), SPLITS - 1)
    splits = tl.arange(0, weights.shape[0])
    before = tl.sum(tl.where(splits == split, ends - weights, 0.0), axis=0)
    return split, target - before


@triton.jit
def find_within(weights, target):
    """Return the first index of float64 `weights` whose cumulative weight exceeds
    `target`, int32."""
    cumulative = tl.cumsum(weights, axis=0)
    # The two sums of a split differ by rounding. The bounds keep the target between the
    # first and the last id with a weight.
    total = tl.max(cumulative, axis=0)
    target = tl.minimum(tl.maximum(target, 0.0), total * (1.0 - 2.0**-53))
    return tl.sum((cumulative <= target).to(tl.int32), axis=0)


def split_rows(op: str, rows: int, vocab: int) -> tuple[int, int]:
    """Return the ids per split, and the splits of a row.

    Raises:
        ValueError: more rows or splits than scratches hold.
    """
    block = split_size(rows, vocab)
    splits = triton.cdiv(vocab, block)
    if rows > MAX_ROWS or splits > MAX_SPLITS:
        raise ValueError(
            f"{op}: {rows} rows of {vocab} ids exceed {MAX_ROWS} rows or "
            f"{MAX_SPLITS * MAX_BLOCK} ids"
        )
    return block, splits


def split_size(rows: int, vocab: int) -> int:
    """Return the ids per program, at most `MAX_BLOCK`: few if a small number of rows
    must fill the device."""
    block: int = 2048 if rows <= 8 else 4096
    while block < MAX_BLOCK and vocab > block * MAX_SPLITS:
        block *= 2
    while block // 2 >= vocab:
        block //= 2
    return block
