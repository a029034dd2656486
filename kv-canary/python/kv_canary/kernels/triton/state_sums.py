"""Checksums of states inside Triton kernels; `state_sums.py` says what they are.

Each program has one cell of its slot, so none shares a sum with another one.
Without sums nothing is compiled. Kernels declare `checksums` and `marks` as
`do_not_specialize_on_alignment`, because each layer has a column of one table.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from kv_canary import state_sums
from kv_canary.kernels.triton.sums import mix32
from kv_canary.state_sums import StateCells

if TYPE_CHECKING:
    from torch import Tensor


FIRST_COLUMN = tl.constexpr(state_sums.FIRST_COLUMN)


class RowSums(NamedTuple):
    """Where a program keeps the sum of its cell.

    Fields:
        kept, stride: sums of all slots, or None. marks, marks_stride: of slots.
        cell: its place in a slot.
    """

    kept: Any
    stride: Any
    marks: Any
    marks_stride: Any
    cell: Any


@triton.jit
def _factors(tap, column):
    """Return `state_sums.factors`, uint32 [taps, columns]."""
    of_columns = mix32(column + FIRST_COLUMN) | 1
    return (mix32(tap) & 0xFFFFFFFE)[:, None] ^ of_columns[None, :]


@triton.jit
def _weigh(elements, factor, mask):
    """Return bits times factors, int64; 0 outside the mask, if there is one."""
    if elements.dtype.primitive_bitwidth == 32:
        bits = elements.to(tl.uint32, bitcast=True)
    else:
        bits = elements.to(tl.uint16, bitcast=True).to(tl.uint32)
    if mask is not None:
        bits = tl.where(mask, bits, 0)
    return (bits.to(tl.uint64) * factor.to(tl.uint64)).to(tl.int64)


@triton.jit
def weigh(sums, elements, tap, column, mask):
    """Return what each of elements [taps, columns] adds to the sum, or 0 if there are
    no sums. The mask may be None if all of them exist."""
    if sums.kept is None:
        return 0
    else:
        return _weigh(elements, _factors(tap, column), mask)


@triton.jit
def weigh_tap(sums, elements, TAP: tl.constexpr, column, mask):
    """Do as `weigh` for elements [.., columns] of one tap."""
    if sums.kept is None:
        return 0
    else:
        factor = (mix32(column * 0 + TAP) & 0xFFFFFFFE) ^ (
            mix32(column + FIRST_COLUMN) | 1
        )
        return _weigh(elements, factor, mask)


@triton.jit
def load_sum(sums, slot, is_known):
    """Return what was kept of the cell, to be loaded before its elements; 0 if there
    are no sums."""
    if sums.kept is None:
        return 0
    else:
        place = sums.kept + slot * sums.stride + sums.cell
        return tl.load(place, mask=is_known, other=0)


@triton.jit
def compare_sum(sums, slot, weighed, due, is_known):
    """Mark a slot if the elements that were loaded do not add up to `due`, unless the
    row has no state."""
    if sums.kept is not None:
        differs = (tl.sum(weighed) != due) & is_known
        tl.store(sums.marks + slot * sums.marks_stride, 1, mask=differs)


@triton.jit
def compare_rows(sums, slots, weighed, is_due):
    """Do as `compare_sum` for rows [N], `weighed` [N, columns]."""
    if sums.kept is not None:
        place = sums.kept + slots * sums.stride + sums.cell
        due = tl.load(place, mask=is_due, other=0)
        differs = is_due & (tl.sum(weighed, axis=1) != due)
        marks = sums.marks + slots * sums.marks_stride
        tl.store(marks, is_due.to(tl.int32), mask=differs)


@triton.jit
def keep_sum(sums, slot, weighed, is_due):
    """Keep the sum of the elements that were stored, if `is_due`."""
    if sums.kept is not None:
        place = sums.kept + slot * sums.stride + sums.cell
        tl.store(place, tl.sum(weighed), mask=is_due)


@triton.jit
def compare_kernel(
    states,
    slots,
    slot_stride,
    layer_stride,
    checksums,
    checksums_stride,
    checksums_layer_stride,
    marks,
    marks_stride,
    BLOCK: tl.constexpr,
    CELLS: tl.constexpr,
):
    """Compare one cell of one slot in one layer."""
    OF_HEAD: tl.constexpr = (CELLS.columns + CELLS.size - 1) // CELLS.size
    SIZE: tl.constexpr = CELLS.size
    number = tl.program_id(0)
    layer = tl.program_id(1)
    slot = tl.load(slots + tl.program_id(2))
    tap = tl.arange(0, BLOCK)
    column = number % OF_HEAD * SIZE + tl.arange(0, SIZE)
    is_column = column < CELLS.columns
    place = number // OF_HEAD * (CELLS.taps * CELLS.columns)
    place += tap[:, None] * CELLS.tap_stride + column[None, :] * CELLS.column_stride
    mask = (tap < CELLS.taps)[:, None] & is_column[None, :]
    loaded = tl.load(
        states + slot * slot_stride + layer.to(tl.int64) * layer_stride + place,
        mask=mask,
        other=0.0,
    )
    sums = RowSums(
        checksums + layer * checksums_layer_stride,
        checksums_stride,
        marks + layer,
        marks_stride,
        number,
    )
    due = load_sum(sums, slot, True)
    weighed = weigh(sums, loaded, tap, column, mask)
    compare_sum(sums, slot, weighed, due, True)


def compare_states(states: Tensor, kept: Tensor, marks: Tensor, slots: Tensor) -> None:
    cells = StateCells.of(states[:, 0])
    if len(slots):
        compare_kernel[(kept.shape[2], states.shape[1], len(slots))](
            states,
            slots,
            states.stride(0),
            states.stride(1),
            kept,
            kept.stride(0),
            kept.stride(1),
            marks,
            marks.stride(0),
            BLOCK=triton.next_power_of_2(cells.taps),
            CELLS=cells,
            num_warps=4,
        )
