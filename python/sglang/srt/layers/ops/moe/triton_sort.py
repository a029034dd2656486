"""Triton kernels that list the rows of every expert in blocks, on the device.

An assignment is a place in `ids` [T, K]: token * K + slot. The list is padded so that
each block has rows of one expert. Its length follows from the number of assignments
alone, and its order from theirs, so nothing waits for the host and nothing is atomic.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.layers.ops.moe.triton_table import max_blocks
from sglang.srt.utils.triton_launch import (
    block_of,
    launch_options,
    let_next_start,
    wait_for_inputs,
)

CHUNKS = (256, 1024)
"""Assignments that a program compares its own with: the smallest size that holds all,
or the largest."""
TILE = 32
"""Assignments, blocks or chunks that a program handles at once, in tables [TILE, E] and
[TILE, chunk]."""


@triton.jit
def _count(ids, chunk, assignments, EXPERTS_BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Count how many of a chunk's assignments each expert has, [EXPERTS_BLOCK]."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < assignments
    chosen = tl.load(ids + at, mask=inside, other=0)
    return tl.histogram(chosen, EXPERTS_BLOCK, mask=inside)


@triton.jit(do_not_specialize=["assignments"])
def count_kernel(
    ids,
    counts,
    assignments,
    EXPERTS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """counts [chunks, EXPERTS_BLOCK]."""
    chunk = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    count = _count(ids, chunk, assignments, EXPERTS_BLOCK, CHUNK)
    expert = tl.arange(0, EXPERTS_BLOCK)
    tl.store(counts + chunk * EXPERTS_BLOCK + expert, count)


@triton.jit(do_not_specialize=["assignments", "blocks", "chunks"])
def place_kernel(
    ids,
    counts,
    rows,
    block_experts,
    assignments,
    blocks,
    chunks,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write rows [blocks * BLOCK_M], an assignment or `assignments` for padding, and
    block_experts [blocks], the expert or EXPERTS_BLOCK for a block without rows.

    A program takes TILE assignments. If `counts` is None there is one chunk, which
    every program counts.
    """
    tile = tl.program_id(0)
    chunk = tile * TILE // CHUNK
    expert = tl.arange(0, EXPERTS_BLOCK)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    before = tl.zeros([EXPERTS_BLOCK], dtype=tl.int32)
    if counts is None:
        total = _count(ids, 0, assignments, EXPERTS_BLOCK, CHUNK)
    else:
        total = tl.zeros([EXPERTS_BLOCK], dtype=tl.int32)
        for first in range(0, chunks, TILE):
            other = first + tl.arange(0, TILE)[:, None]
            at = counts + other * EXPERTS_BLOCK + expert[None, :]
            count = tl.load(at, mask=other < chunks, other=0)
            total += tl.sum(count, axis=0)
            before += tl.sum(tl.where(other < chunk, count, 0), axis=0)
    room = (total + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(room, axis=0)
    begin = end - room
    # Each program writes the experts and the padding of its share of the blocks.
    m = tl.arange(0, BLOCK_M)[None, :]
    for first in range(tile * TILE, blocks, tl.num_programs(0) * TILE):
        block = first + tl.arange(0, TILE)
        is_block = block < blocks
        owner = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), axis=1)
        tl.store(block_experts + block, owner, mask=is_block)
        left = total[None, :] - (block[:, None] - begin[None, :]) * BLOCK_M
        filled = tl.sum(tl.where(owner[:, None] == expert[None, :], left, 0), axis=1)
        tl.store(
            rows + block[:, None] * BLOCK_M + m,
            assignments,
            mask=is_block[:, None] & (m >= filled[:, None]),
        )
    at = tile * TILE + tl.arange(0, TILE)
    one = tl.load(ids + at, mask=at < assignments, other=-1)[:, None]
    other = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(ids + other, mask=other < assignments, other=-1)
    is_earlier = (one == chosen[None, :]) & (other[None, :] < at[:, None])
    rank = tl.sum(is_earlier.to(tl.int32), axis=1)
    first_row = (begin * BLOCK_M + before)[None, :]
    row = tl.sum(tl.where(one == expert[None, :], first_row, 0), axis=1)
    tl.store(rows + row + rank, at, mask=at < assignments)


def sort_by_expert(ids: Tensor, *, experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """List the assignments of `ids` in blocks of `block_m` rows of one expert.

    Args:
        ids: [T, K] int32, contiguous, each from 0 to `experts` - 1; at least one.

    Returns:
        rows [blocks * block_m] int32: assignments in the order of experts, or T * K
        where a block is padded; and the expert of each block, [blocks] int32, at least
        `experts` for a block without rows.
    """
    assignments = ids.numel()
    blocks = max_blocks(assignments=assignments, experts=experts, block_m=block_m)
    experts_block = block_of(experts)
    rows = ids.new_empty(blocks * block_m)
    block_experts = ids.new_empty(blocks)
    chunk = next((size for size in CHUNKS if assignments <= size), CHUNKS[-1])
    chunks = triton.cdiv(assignments, chunk)
    common = {
        "EXPERTS_BLOCK": experts_block,
        "CHUNK": chunk,
        "num_warps": 4,
        **launch_options(ids.device),
    }
    counts = None
    if chunks > 1:
        counts = ids.new_empty(chunks, experts_block)
        count_kernel[(chunks,)](ids, counts, assignments, **common)
    place_kernel[(triton.cdiv(assignments, TILE),)](
        ids,
        counts,
        rows,
        block_experts,
        assignments,
        blocks,
        chunks,
        BLOCK_M=block_m,
        TILE=TILE,
        **common,
    )
    return rows, block_experts


def sort_by_expert_ref(
    ids: Tensor, *, experts: int, block_m: int
) -> tuple[Tensor, Tensor]:
    """Torch oracle of `sort_by_expert`."""
    assignments = ids.numel()
    blocks = max_blocks(assignments=assignments, experts=experts, block_m=block_m)
    rows, owners = [], []
    for expert in range(experts):
        mine = (ids.flatten() == expert).nonzero()[:, 0].tolist()
        rows += mine + [assignments] * (-len(mine) % block_m)
        owners += [expert] * -(-len(mine) // block_m)
    rows += [assignments] * (blocks * block_m - len(rows))
    owners += [block_of(experts)] * (blocks - len(owners))
    return (
        torch.tensor(rows, dtype=torch.int32, device=ids.device),
        torch.tensor(owners, dtype=torch.int32, device=ids.device),
    )
