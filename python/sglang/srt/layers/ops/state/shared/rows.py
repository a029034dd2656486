"""Ragged rows inside Triton kernels: which row a token or a chunk belongs to.

Chunk c of row r has the place indptr[r] // CHUNK + r + c. These places are distinct and
below T // CHUNK + R, so a launch needs no table of chunks, and no lengths on the host.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

_LEAST_STEPS = 8


def search_steps(rows: int) -> int:
    """Return the halvings that find one of `rows` rows; the same for all small batches,
    because kernels are compiled for it.
    """
    return max(_LEAST_STEPS, rows.bit_length())


@triton.jit
def first_place(indptr, row, CHUNK: tl.constexpr):
    """Return the place of a row's first chunk."""
    return (tl.load(indptr + row) // CHUNK + row).to(tl.int32)


@triton.jit
def find_row(indptr, rows, value, CHUNK: tl.constexpr, STEPS: tl.constexpr):
    """Return the last row that begins at or before `value`: a token if CHUNK is 0, else
    the place of a chunk. `value` is a scalar or a block.
    """
    row = value * 0
    for step in tl.static_range(STEPS):
        other = row + (1 << (STEPS - 1 - step))
        is_row = other < rows
        begin = tl.load(indptr + other, mask=is_row, other=0)
        if CHUNK > 0:
            begin = begin // CHUNK + other
        row = tl.where(is_row & (begin <= value), other, row)
    return row
