"""Triton kernel that sums up runs of states, wherever their parts lie."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kv_canary import state_parts
from kv_canary.kernels.triton.sums import byte_factors

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state_parts import StateParts

Part, Turn = state_parts.Part, state_parts.Turn
LINE = tl.constexpr(len(Part))
STRIDE, COUNT, RUN, LOW, HIGH = (
    tl.constexpr(int(part))
    for part in (Part.STRIDE, Part.COUNT, Part.RUN, Part.LOW, Part.HIGH)
)
WHOLE = tl.constexpr(int(Turn.WHOLE))
NOTHING = tl.constexpr(int(Turn.NOTHING))
BLOCK = 1024
TILES = 8
"""Programs of a part: a whole state of megabytes is too much for one."""


@triton.jit
def _is_wild(word, exponent):
    return (exponent != 0) & ((word & exponent) == exponent)


@triton.jit
def sum_states_kernel(
    slots,
    groups,
    turns,
    table,
    found,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Add a tile of the run of one part of one state to its sum.

    The second half of `found` has no pointer of its own, because Triton would compile
    the kernel again for some places.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_parts = tl.num_programs(1)
    line = table + (tl.load(groups + row) * num_parts + part) * LINE
    count, run = tl.load(line + COUNT), tl.load(line + RUN)
    turn = tl.load(turns + row)
    number = tl.maximum(turn, 0) % tl.maximum((count + run - 1) // run, 1)
    begin = number * run
    end = tl.where(turn == WHOLE, count, tl.minimum(begin + run, count))
    end = tl.where(turn == NOTHING, begin, end)
    tile = (end - begin + TILES * BLOCK - 1) // (TILES * BLOCK) * BLOCK
    first = begin + tl.program_id(2) * tile
    end = tl.minimum(first + tile, end)
    if first < end:
        low = tl.load(line + LOW).to(tl.int32)
        high = tl.load(line + HIGH).to(tl.int32)
        words = tl.load(line).to(tl.pointer_type(tl.int32))
        words += tl.load(slots + row) * tl.load(line + STRIDE)
        total = tl.zeros([BLOCK], tl.int64)
        count_wild = tl.zeros([BLOCK], tl.int32)
        for at in range(first.to(tl.int32), end.to(tl.int32), BLOCK):
            place = at + tl.arange(0, BLOCK)
            word = tl.load(words + place, mask=place < end, other=0)
            total += word.to(tl.int64) * byte_factors(place).to(tl.int64)
            is_wild = _is_wild(word, low) | _is_wild(word, high)
            count_wild += is_wild.to(tl.int32)
        to = row * num_parts + part
        tl.atomic_add(found + to, tl.sum(total, axis=0))
        num_wild = tl.sum(count_wild, axis=0)
        if num_wild > 0:
            to += tl.num_programs(0).to(tl.int64) * num_parts
            tl.atomic_add(found + to, num_wild.to(tl.int64))


def sum_states(
    slots: Tensor, groups: Tensor, turns: Tensor, parts: StateParts, found: Tensor
) -> None:
    found.zero_()
    sum_states_kernel[(len(slots), parts.num_parts, TILES)](
        slots,
        groups,
        turns,
        parts.table,
        found,
        BLOCK=BLOCK,
        TILES=TILES,
        num_warps=4,
    )
