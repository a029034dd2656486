"""Moves with one launch per tensor, which read and write every byte once."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.kv_tiers.ops.slot_sums.triton import MOST_WORDS, mixed_words

_NUMBERS = ["per_unit", "width", "unit_stride", "layer_stride", "slot_stride"]


@triton.jit
def _row_of_unit(rows, number, layer, per_unit, width, unit_stride):
    """The place of row `number` of all units in one layer."""
    inner = layer.to(tl.int64) * per_unit + number % per_unit
    return rows + number // per_unit * unit_stride.to(tl.int64) + inner * width


@triton.jit(
    do_not_specialize=["first_layer", *_NUMBERS],
    do_not_specialize_on_alignment=["rows", "sums", "words", "slots"],
)
def gather_kernel(
    rows,
    sums,
    words,
    slots,
    first_layer,
    per_unit,
    width,
    unit_stride,
    layer_stride,
    slot_stride,
    BLOCK: tl.constexpr,
):
    """A program moves and sums one slot of one layer. Strides count words."""
    row = tl.program_id(0)
    layer = tl.program_id(1)
    slot = tl.load(slots + row)
    source = words + layer * layer_stride.to(tl.int64) + slot * slot_stride
    target = _row_of_unit(rows, row.to(tl.int64), layer, per_unit, width, unit_stride)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for begin in range(0, width, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < width
        word = tl.load(source + place, mask=inside, other=0)
        tl.store(target + place, word, mask=inside)
        mixed = mixed_words(word, first_layer + layer, place)
        total += tl.where(inside, mixed, 0)
    tl.atomic_add(sums + row, tl.sum(total, axis=0), sem="relaxed")


@triton.jit(
    do_not_specialize=_NUMBERS,
    do_not_specialize_on_alignment=["words", "slots", "rows", "numbers"],
)
def scatter_kernel(
    words,
    slots,
    rows,
    numbers,
    per_unit,
    width,
    unit_stride,
    layer_stride,
    slot_stride,
    BLOCK: tl.constexpr,
):
    """A program moves one row of one layer. Strides count words."""
    layer = tl.program_id(1)
    slot = tl.load(slots + tl.program_id(0))
    number = tl.load(numbers + tl.program_id(0))
    source = _row_of_unit(rows, number, layer, per_unit, width, unit_stride)
    target = words + layer * layer_stride.to(tl.int64) + slot * slot_stride
    for begin in range(0, width, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < width
        word = tl.load(source + place, mask=inside, other=0)
        tl.store(target + place, word, mask=inside)


def _sizes(rows: Tensor, words: Tensor) -> tuple[int, ...]:
    """Return the values of `_NUMBERS`."""
    return (rows.shape[2], words.shape[2], rows.stride(0), *words.stride()[:2])


def _options(words: Tensor) -> dict[str, int]:
    width = triton.next_power_of_2(words.shape[2])
    return {"BLOCK": min(width, MOST_WORDS), "num_warps": 4}


def gather_rows(
    rows: Tensor, sums: Tensor, words: Tensor, slots: Tensor, *, first_layer: int
) -> None:
    """`gather_rows` of `op.py`."""
    if len(slots):
        gather_kernel[(len(slots), len(words))](
            rows,
            sums,
            words,
            slots,
            first_layer,
            *_sizes(rows, words),
            **_options(words),
        )


def scatter_rows(words: Tensor, slots: Tensor, rows: Tensor, numbers: Tensor) -> None:
    """`scatter_rows` of `op.py`."""
    if len(slots):
        scatter_kernel[(len(slots), len(words))](
            words, slots, rows, numbers, *_sizes(rows, words), **_options(words)
        )
