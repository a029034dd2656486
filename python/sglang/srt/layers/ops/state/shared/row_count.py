"""Counts of folded tokens inside Triton kernels; `counts.py` says what they are.

Several programs share a row, and one of them counts. Kernels declare `folded` as
`do_not_specialize_on_alignment`, because each layer has a column of one table.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class RowCounts(NamedTuple):
    """Where a program counts the tokens of its row.

    Fields:
        folded, stride: the counts of all slots, or None.
        is_writer: whether it counts; true in one program of each row.
    """

    folded: Any
    stride: Any
    is_writer: Any


@triton.jit
def read_count(counts, slot, is_known):
    """Return the tokens folded into a slot before this launch, or 0 unless `is_known`.
    Only the writer reads them: others might read what it has stored.
    """
    before = 0
    if counts.folded is not None:
        is_read = counts.is_writer & is_known
        before = tl.load(counts.folded + slot * counts.stride, mask=is_read, other=0)
    return before


@triton.jit
def write_count(counts, slot, tokens, is_due):
    """Store how many tokens are folded into a slot, if `is_due`."""
    if counts.folded is not None:
        is_written = counts.is_writer & is_due
        place = counts.folded + slot * counts.stride
        tl.store(place, tokens.to(tl.int32), mask=is_written)
