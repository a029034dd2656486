"""Triton kernel that adds up the rows of all ranks through `PeerMemory`.

```
 rank 0, program p            rank 1, program p
 writes its rows  ----------> region (turn, sender 0, p)
 region (turn, sender 1, p) <-------- writes its rows
 flag (p, 0) := n  ---------> waits for n, adds
 waits for n, adds  <-------- flag (p, 1) := n
```

Every rank adds in the order of the ranks, in float32, so all get the same bits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.distributed.peer_memory import PROGRAMS, REGION_BYTES, PeerMemory
from sglang.srt.utils.triton_launch import (
    launch_options,
    let_next_start,
    wait_for_inputs,
)

_PROGRAMS = tl.constexpr(PROGRAMS)


class PeerSizes(NamedTuple):
    """Constants that a kernel with `exchange` is compiled for; its argument SIZES.

    Fields:
        rank, world: this rank and the number of ranks.
        region: elements of a program's region.
        width: channels of a row; block: power of two that holds them.
    """

    rank: int
    world: int
    region: int
    width: int
    block: int


@triton.jit
def _region(addresses, holder, sender, turn, like, SIZES: tl.constexpr):
    """Return where this program finds the rows of `sender` in the memory of `holder`,
    as a pointer like `like`."""
    begin = tl.load(addresses + holder).to(tl.pointer_type(like.dtype.element_ty))
    # So that the compiler may move 16 bytes at once.
    begin = tl.multiple_of(begin, 16)
    place = (turn * SIZES.world + sender) * _PROGRAMS + tl.program_id(0)
    return begin + place * SIZES.region


@triton.jit
def exchange(x, rows, addresses, counts, SIZES: tl.constexpr):
    """Send this program's rows of `x` [rows, width], every `num_programs`-th, to the
    other ranks, and wait for theirs. Returns the turn, for `row_sum`."""
    RANK: tl.constexpr = SIZES.rank
    WORLD: tl.constexpr = SIZES.world
    program = tl.program_id(0)
    channel = tl.arange(0, SIZES.block)
    inside = channel < SIZES.width
    number = tl.load(counts + program) + 1
    turn = number % 2
    for row in range(program, rows, tl.num_programs(0)):
        at = x + tl.cast(row, tl.int64) * SIZES.width + channel
        value = tl.load(at, mask=inside, other=0.0)
        place = row // tl.num_programs(0)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                region = _region(addresses, rank, RANK, turn, x, SIZES)
                tl.store(region + place * SIZES.width + channel, value, mask=inside)
    # What other threads wrote goes before the flag that one thread releases.
    tl.debug_barrier()
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            flags = tl.load(addresses + WORLD + rank).to(tl.pointer_type(tl.int64))
            flag = flags + program * WORLD + RANK
            tl.atomic_xchg(flag, number, sem="release", scope="sys")
    flags = tl.load(addresses + WORLD + RANK).to(tl.pointer_type(tl.int64))
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            flag = flags + program * WORLD + rank
            # The other rank may be a launch ahead, never behind.
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < number:
                pass
    tl.store(counts + program, number)
    return turn


@triton.jit
def row_sum(x, row, turn, addresses, SIZES: tl.constexpr):
    """Return the sum [block] of one of this program's rows over the ranks, rounded to
    the dtype of `x`."""
    RANK: tl.constexpr = SIZES.rank
    WORLD: tl.constexpr = SIZES.world
    place = row // tl.num_programs(0)
    channel = tl.arange(0, SIZES.block)
    inside = channel < SIZES.width
    total = tl.zeros_like(channel).to(tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            part = x + tl.cast(row, tl.int64) * SIZES.width
        else:
            region = _region(addresses, RANK, rank, turn, x, SIZES)
            part = region + place * SIZES.width
        # Not from the first level of the cache, which may hold the last turn's.
        value = tl.load(part + channel, mask=inside, other=0.0, cache_modifier=".cg")
        total += value.to(tl.float32)
    return total.to(x.dtype.element_ty)


@triton.jit
def sum_rows_kernel(x, rows, addresses, counts, SIZES: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    turn = exchange(x, rows, addresses, counts, SIZES)
    channel = tl.arange(0, SIZES.block)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        total = row_sum(x, row, turn, addresses, SIZES)
        at = x + tl.cast(row, tl.int64) * SIZES.width + channel
        tl.store(at, total, mask=channel < SIZES.width)


def sum_rows(x: Tensor, memory: PeerMemory) -> None:
    """x [..., W] := its sum over the ranks, in one launch; contiguous, and
    `memory.can_send` it.

    All ranks must make the same launches with one `memory` in the same order.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    sum_rows_kernel[(min(rows, PROGRAMS),)](x, rows, **peer_arguments(memory, width, x))


def peer_arguments(memory: PeerMemory, width: int, x: Tensor) -> dict[str, Any]:
    """Return the launch arguments of a kernel that calls `exchange` on `x`."""
    block = triton.next_power_of_2(width)
    return {
        "addresses": memory.addresses,
        "counts": memory.counts,
        "SIZES": PeerSizes(
            rank=memory.rank,
            world=memory.size,
            region=REGION_BYTES // x.itemsize,
            width=width,
            block=block,
        ),
        "num_warps": min(max(block // 512, 1), 16),
        **launch_options(x.device),
    }
