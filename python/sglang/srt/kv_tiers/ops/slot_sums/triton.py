"""Sums of all bytes of slots with one launch per tensor and no temporary."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kv_canary.kernels.triton.hash import mix64

MOST_WORDS = 1024
"""Words of a program at once."""


@triton.jit
def mixed_words(word, layer, place):
    """What words of one layer add to the sum of their slot."""
    number = layer.to(tl.int64) << 32
    return mix64(word.to(tl.int64) ^ mix64(number | place))


@triton.jit(
    do_not_specialize=["first_layer", "width", "layer_stride", "slot_stride"],
    do_not_specialize_on_alignment=["sums", "words", "slots"],
)
def sum_kernel(
    sums,
    words,
    slots,
    first_layer,
    width,
    layer_stride,
    slot_stride,
    BLOCK: tl.constexpr,
):
    """A program sums one slot of one layer. Strides count words."""
    row = tl.program_id(0)
    layer = tl.program_id(1)
    slot = tl.load(slots + row)
    at = words + layer * layer_stride.to(tl.int64) + slot * slot_stride
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for begin in range(0, width, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < width
        word = tl.load(at + place, mask=inside, other=0)
        mixed = mixed_words(word, first_layer + layer, place)
        total += tl.where(inside, mixed, 0)
    value = tl.sum(total, axis=0)
    tl.atomic_add(sums + row, value, sem="relaxed")


def add_slot_sums(
    sums: Tensor, words: Tensor, slots: Tensor, *, first_layer: int
) -> None:
    """`add_slot_sums` of `op.py`."""
    layers, _, width = words.shape
    if not len(slots):
        return
    block = min(triton.next_power_of_2(width), MOST_WORDS)
    sum_kernel[(len(slots), layers)](
        sums,
        words,
        slots,
        first_layer,
        width,
        words.stride(0),
        words.stride(1),
        BLOCK=block,
        num_warps=4,
    )
