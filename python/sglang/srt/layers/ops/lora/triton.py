"""Triton form of the products of adapters: two kernels per layer.

The first multiplies by A, in parts of the sum over K; the second adds the parts,
multiplies by B and adds to the output. A program handles one tile: tokens of one
adapter. Nothing that changes from step to step is a launch argument, so captured
graphs work for all batches, and programs of unused tiles end at once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.forward.adapter_tiles import TILE, AdapterTiles
from sglang.srt.layers.ops.lora.op import FEW_TILES, AdapterStack
from sglang.srt.utils.triton_launch import (
    let_next_start,
    supports_dependent_launch,
    wait_for_inputs,
)

BLOCK_R = 16
BLOCK_K = 128
BLOCK_N = 128
# Of the sum over K, if there are few tiles.
SPLIT_K = 8
MAX_SHARDS = 3


@triton.jit
def _tile_rows(words, tile, TILE_ROWS: tl.constexpr):
    """Return a tile's tokens, -1 where there is none."""
    m = tl.arange(0, TILE_ROWS)
    return tl.load(words + tile * (TILE_ROWS + 1) + 1 + m)


@triton.jit
def shrink_kernel(
    x,
    a,
    ranks,
    words,
    inner,
    x_stride,
    a_stride,
    K: tl.constexpr,
    RANK: tl.constexpr,
    SHARDS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    R_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """inner[split, tile, m, shard * RANK + r] = part of x[row m] . a[slot, shard, r].

    Programs: (tiles, shards * RANK / R_BLOCK, SPLIT).
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(words + tile * (TILE_ROWS + 1))
    first = (part % (RANK // R_BLOCK)) * R_BLOCK
    if first < tl.load(ranks + slot):
        rows = _tile_rows(words, tile, TILE_ROWS)
        live = (rows >= 0)[:, None]
        x_rows = x + rows.to(tl.int64)[:, None] * x_stride
        r = part * R_BLOCK + tl.arange(0, R_BLOCK)
        a_rows = a + (slot - 1).to(tl.int64) * a_stride + r[None, :] * K
        total = tl.zeros([TILE_ROWS, R_BLOCK], dtype=tl.float32)
        for start in range(split * K_BLOCK, K, SPLIT * K_BLOCK):
            k = start + tl.arange(0, K_BLOCK)
            inside = k < K
            given = tl.load(x_rows + k[None, :], mask=live & inside[None, :], other=0.0)
            weight = tl.load(a_rows + k[:, None], mask=inside[:, None], other=0.0)
            total = tl.dot(given, weight, total, input_precision="ieee")
        m = (split * tl.num_programs(0) + tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        tl.store(inner + m[:, None] * (SHARDS * RANK) + r[None, :], total)


@triton.jit
def expand_kernel(
    inner,
    b,
    ranks,
    words,
    y,
    y_stride,
    b_stride,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    RANK: tl.constexpr,
    SHARDS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    R_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[row m, n] += inner[tile, m, shard of n] . b[slot, n].

    Programs: (tiles, blocks of N0, of N1 and of N2).
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(words + tile * (TILE_ROWS + 1))
    rank = tl.load(ranks + slot)
    if rank > 0:
        shard, begin, end = 0, 0, N0
        second = tl.cdiv(N0, N_BLOCK)
        third = second + tl.cdiv(N1, N_BLOCK)
        if block >= third:
            shard, begin, end = 2, N0 + N1, N0 + N1 + N2
            block -= third
        elif block >= second:
            shard, begin, end = 1, N0, N0 + N1
            block -= second
        n = begin + block * N_BLOCK + tl.arange(0, N_BLOCK)
        inside = (n < end)[None, :]
        b_rows = b + (slot - 1).to(tl.int64) * b_stride + n[None, :] * RANK
        total = tl.zeros([TILE_ROWS, N_BLOCK], dtype=tl.float32)
        for first in range(0, rank, R_BLOCK):
            r = first + tl.arange(0, R_BLOCK)
            part = tl.zeros([TILE_ROWS, R_BLOCK], dtype=tl.float32)
            for split in tl.static_range(SPLIT):
                m = (split * tl.num_programs(0) + tile) * TILE_ROWS
                m += tl.arange(0, TILE_ROWS)
                place = m[:, None] * (SHARDS * RANK) + shard * RANK + r[None, :]
                part += tl.load(inner + place)
            weight = tl.load(b_rows + r[:, None], mask=inside, other=0.0)
            part = part.to(weight.dtype)
            total = tl.dot(part, weight, total, input_precision="ieee")
        rows = _tile_rows(words, tile, TILE_ROWS)
        place = y + rows.to(tl.int64)[:, None] * y_stride + n[None, :]
        mask = (rows >= 0)[:, None] & inside
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, total.to(y.dtype.element_ty), mask=mask)


def lora_add(y: Tensor, x: Tensor, stack: AdapterStack, tiles: AdapterTiles) -> Tensor:
    """`ops.lora.lora_add`.

    Raises:
        ValueError: a shape or a dtype does not fit.
    """
    k, shards = stack.a.shape[2], len(stack.sizes)
    _check(y, x, stack)
    count, rank = len(tiles.words), stack.rank
    if not count:
        return y
    split = min(SPLIT_K, triton.cdiv(k, BLOCK_K)) if count <= FEW_TILES else 1
    inner = torch.empty(
        split * count * TILE * shards * rank, dtype=torch.float32, device=x.device
    )
    pdl = supports_dependent_launch(x.device)
    common: dict[str, Any] = {
        "RANK": rank,
        "SHARDS": shards,
        "SPLIT": split,
        "TILE_ROWS": TILE,
        "R_BLOCK": BLOCK_R,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    shrink_kernel[(count, shards * rank // BLOCK_R, split)](
        x,
        stack.a,
        stack.ranks,
        tiles.words,
        inner,
        x.stride(0),
        stack.a.stride(0),
        K=k,
        K_BLOCK=BLOCK_K,
        **common,
    )
    sizes = (*stack.sizes, 0, 0)
    blocks = sum(triton.cdiv(size, BLOCK_N) for size in stack.sizes)
    expand_kernel[(count, blocks)](
        inner,
        stack.b,
        stack.ranks,
        tiles.words,
        y,
        y.stride(0),
        stack.b.stride(0),
        N0=sizes[0],
        N1=sizes[1],
        N2=sizes[2],
        N_BLOCK=BLOCK_N,
        **common,
    )
    return y


def _check(y: Tensor, x: Tensor, stack: AdapterStack) -> None:
    rank, shards = stack.rank, len(stack.sizes)
    k, n = stack.a.shape[2], sum(stack.sizes)
    fits = (
        x.dim() == y.dim() == 2
        and x.shape == (y.shape[0], k)
        and y.shape[1] == stack.b.shape[1] == n
        and stack.a.shape[1] == shards * rank
        and stack.a.stride()[1:] == (k, 1)
        and stack.b.stride()[1:] == (rank, 1)
        and x.stride(1) == y.stride(1) == 1
        and rank % BLOCK_R == 0
        and 1 <= shards <= MAX_SHARDS
        and x.dtype == y.dtype == stack.a.dtype == stack.b.dtype
    )
    if not fits:
        raise ValueError(
            f"lora_add: y {y.dtype} {tuple(y.shape)}, x {x.dtype} {tuple(x.shape)}, "
            f"a {stack.a.dtype} {tuple(stack.a.shape)}, b {tuple(stack.b.shape)}, "
            f"shards {stack.sizes}"
        )
