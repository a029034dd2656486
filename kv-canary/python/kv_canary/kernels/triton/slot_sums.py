"""Triton kernel that sums the values of slots, wherever in a page they lie."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

MAX_BLOCK = 1024


@triton.jit(do_not_specialize=["num_layers"])
def sum_slots_kernel(
    values,
    bases,
    offsets,
    keys,
    slots,
    sums,
    num_layers,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the COUNT values of one slot in one layer."""
    number, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + number)
    begin = tl.load(bases + layer) + slot // PAGE_SIZE * page_stride
    line = offsets + slot % PAGE_SIZE * COUNT
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, COUNT, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < COUNT
        at = tl.load(line + place, mask=inside, other=0)
        value = tl.load(values + begin + at, mask=inside, other=0).to(tl.int64)
        total += value * tl.load(keys + place, mask=inside, other=0)
    tl.store(sums + number * num_layers + layer, tl.sum(total, axis=0))


def sum_slots(
    values: Tensor,
    bases: Tensor,
    offsets: Tensor,
    keys: Tensor,
    slots: Tensor,
    page_stride: int,
    sums: Tensor,
) -> None:
    count = offsets.shape[1]
    if not sums.numel():
        return
    sum_slots_kernel[(len(slots), len(bases))](
        values,
        bases,
        offsets,
        keys,
        slots,
        sums,
        len(bases),
        page_stride,
        PAGE_SIZE=len(offsets),
        COUNT=count,
        BLOCK=min(1 << max(count - 1, 0).bit_length(), MAX_BLOCK),
        num_warps=4,
    )
