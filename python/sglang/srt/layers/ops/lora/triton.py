"""Triton form of the products of adapters.

`shrink_kernel` multiplies by A, in parts of the sum over K. `expand_kernel` adds the
parts, multiplies by B and adds to the layer's product; `expand_gated_kernel` applies
the activation as well. A program handles one tile: tokens of one adapter. Nothing that
changes from step to step is a launch argument, so captured graphs work for all batches.

Adapters do not depend on the preceding kernel, so programs fetch them before they wait
for it. The sums of a token do not depend on the other tokens of its tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.forward.adapter_tiles import TILE, AdapterTiles
from sglang.srt.layers.ops.activation.triton import IS_GELU, activated
from sglang.srt.layers.ops.linear.triton_kernels import prefetch_items
from sglang.srt.layers.ops.lora.table import shape_of
from sglang.srt.utils.triton_launch import (
    launch_options,
    let_next_start,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from sglang.srt.layers.ops.lora.op import AdapterStack

BLOCK_R = 16
MAX_SHARDS = 3
AHEAD = tl.constexpr(64)  # columns of B


@triton.jit
def _tile_rows(words, tile, TILE_ROWS: tl.constexpr):
    """Return a tile's tokens, -1 where there is none."""
    m = tl.arange(0, TILE_ROWS)
    return tl.load(words + tile * (TILE_ROWS + 1) + 1 + m)


@triton.jit
def _tile_slot(words, tile, TILE_ROWS: tl.constexpr):
    """Return the slot of a tile's adapter, or 0."""
    return tl.load(words + tile * (TILE_ROWS + 1))


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
    SLICE_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    R_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """inner[split, tile, m, shard * RANK + r] = part of x[row m] . a[slot, shard, r].

    Programs: (tiles, shards * RANK / R_BLOCK, K / SLICE_K).
    """
    let_next_start(PDL)
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = _tile_slot(words, tile, TILE_ROWS)
    is_live = (part % (RANK // R_BLOCK)) * R_BLOCK < tl.load(ranks + slot)
    rows = _tile_rows(words, tile, TILE_ROWS)
    r = part * R_BLOCK + tl.arange(0, R_BLOCK)
    a_rows = a + (slot - 1).to(tl.int64) * a_stride + r * K
    begin = split * SLICE_K
    end = tl.minimum(begin + SLICE_K, K)
    if PDL and is_live:
        for ahead in tl.static_range(0, SLICE_K, K_BLOCK):
            prefetch_items(a_rows[:, None], begin + ahead, K, K_BLOCK)
    wait_for_inputs(PDL)
    if is_live:
        live = (rows >= 0)[:, None]
        x_rows = x + rows.to(tl.int64)[:, None] * x_stride
        total = tl.zeros([TILE_ROWS, R_BLOCK], dtype=tl.float32)
        for start in range(begin, end, K_BLOCK):
            k = start + tl.arange(0, K_BLOCK)
            if K % K_BLOCK == 0:
                given = tl.load(x_rows + k[None, :], mask=live, other=0.0)
                weight = tl.load(a_rows[None, :] + k[:, None])
            else:
                inside = k < K
                given = tl.load(
                    x_rows + k[None, :], mask=live & inside[None, :], other=0.0
                )
                weight = tl.load(
                    a_rows[None, :] + k[:, None], mask=inside[:, None], other=0.0
                )
            total = tl.dot(given, weight, total, input_precision="ieee")
        m = (split * tl.num_programs(0) + tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        tl.store(inner + m[:, None] * (SHARDS * RANK) + r[None, :], total)


@triton.jit
def _b_rows(b, slot, b_stride, n, RANK: tl.constexpr):
    """Return pointers [1, N] to the rows of B for outputs n."""
    return b + (slot - 1).to(tl.int64) * b_stride + n[None, :] * RANK


@triton.jit
def _first_weights(
    b_rows, rank, inside, RANK: tl.constexpr, R_BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Return the first R_BLOCK columns of B, [R_BLOCK, N], and fetch some others."""
    if PDL and RANK > R_BLOCK and rank > R_BLOCK:
        prefetch_items(tl.trans(b_rows), 0, RANK, AHEAD)
    r = tl.arange(0, R_BLOCK)[:, None]
    return tl.load(b_rows + r, mask=inside & (rank > 0), other=0.0)


@triton.jit
def _inner_part(
    inner,
    tile,
    column,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    R_BLOCK: tl.constexpr,
):
    """Return the inner product of R_BLOCK columns, [TILE_ROWS, R_BLOCK]."""
    r = column + tl.arange(0, R_BLOCK)
    total = tl.zeros([TILE_ROWS, R_BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLIT):
        m = (split * tl.num_programs(0) + tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        total += tl.load(inner + m[:, None] * WIDTH + r[None, :])
    return total


@triton.jit
def _gained(
    inner,
    tile,
    shard,
    b_rows,
    weight,
    rank,
    inside,
    RANK: tl.constexpr,
    SHARDS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    R_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
):
    """Return inner[tile, :, shard] . B, [TILE_ROWS, N_BLOCK]; `weight` is the first
    block of B."""
    WIDTH: tl.constexpr = SHARDS * RANK
    total = tl.zeros([TILE_ROWS, N_BLOCK], dtype=tl.float32)
    if rank > 0:
        first = shard * RANK
        part = _inner_part(inner, tile, first, WIDTH, SPLIT, TILE_ROWS, R_BLOCK)
        part = part.to(weight.dtype)
        total = tl.dot(part, weight, total, input_precision="ieee")
        if RANK > R_BLOCK:
            for column in range(R_BLOCK, rank, R_BLOCK):
                part = _inner_part(
                    inner, tile, first + column, WIDTH, SPLIT, TILE_ROWS, R_BLOCK
                ).to(weight.dtype)
                r = column + tl.arange(0, R_BLOCK)
                later = tl.load(b_rows + r[:, None], mask=inside, other=0.0)
                total = tl.dot(part, later, total, input_precision="ieee")
    return total


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
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = _tile_slot(words, tile, TILE_ROWS)
    rank = tl.load(ranks + slot)
    rows = _tile_rows(words, tile, TILE_ROWS)
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
    b_rows = _b_rows(b, slot, b_stride, n, RANK)
    weight = _first_weights(b_rows, rank, inside, RANK, R_BLOCK, PDL)
    wait_for_inputs(PDL)
    if rank > 0:
        place = y + rows.to(tl.int64)[:, None] * y_stride + n[None, :]
        mask = (rows >= 0)[:, None] & inside
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        total = _gained(
            inner,
            tile,
            shard,
            b_rows,
            weight,
            rank,
            inside,
            RANK,
            SHARDS,
            SPLIT,
            TILE_ROWS,
            R_BLOCK,
            N_BLOCK,
        )
        tl.store(place, (before + total).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def expand_gated_kernel(
    inner,
    b,
    ranks,
    words,
    y,
    out,
    tokens,
    y_stride,
    b_stride,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    R_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row m, n] = activation(gate[n]) * up[n], where [gate | up] is y[row m] with
    the adapters' products added. Also for rows without an adapter.

    tokens: rows of y. Programs: (tiles, blocks of WIDTH).
    """
    let_next_start(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = _tile_slot(words, tile, TILE_ROWS)
    rank = tl.load(ranks + slot)
    rows = _tile_rows(words, tile, TILE_ROWS)
    n = block * N_BLOCK + tl.arange(0, N_BLOCK)
    inside = (n < WIDTH)[None, :]
    gate_rows = _b_rows(b, slot, b_stride, n, RANK)
    up_rows = _b_rows(b, slot, b_stride, WIDTH + n, RANK)
    gate_weight = _first_weights(gate_rows, rank, inside, RANK, R_BLOCK, PDL)
    up_weight = _first_weights(up_rows, rank, inside, RANK, R_BLOCK, PDL)
    wait_for_inputs(PDL)
    mask = ((rows >= 0) & (rows < tokens))[:, None] & inside
    rows = rows.to(tl.int64)[:, None]
    place = y + rows * y_stride + n[None, :]
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=mask, other=0.0).to(tl.float32)
    gate += _gained(
        inner,
        tile,
        0,
        gate_rows,
        gate_weight,
        rank,
        inside,
        RANK,
        2,
        SPLIT,
        TILE_ROWS,
        R_BLOCK,
        N_BLOCK,
    )
    up += _gained(
        inner,
        tile,
        1,
        up_rows,
        up_weight,
        rank,
        inside,
        RANK,
        2,
        SPLIT,
        TILE_ROWS,
        R_BLOCK,
        N_BLOCK,
    )
    # The activation gets the sum rounded as it would be stored.
    gate = gate.to(y.dtype.element_ty).to(tl.float32)
    up = up.to(y.dtype.element_ty).to(tl.float32)
    result = activated(gate, up, GELU)
    tl.store(
        out + rows * WIDTH + n[None, :], result.to(out.dtype.element_ty), mask=mask
    )


def lora_shrink(x: Tensor, stack: AdapterStack, tiles: AdapterTiles) -> Tensor:
    """`ops.lora.lora_shrink`.

    Raises:
        ValueError: a shape or a dtype does not fit.
    """
    rank, shards, k = stack.rank, len(stack.sizes), stack.a.shape[2]
    count = len(tiles.words)
    fits = (
        x.dim() == 2
        and x.shape[1] == k
        and x.stride(1) == 1
        and stack.a.shape[1] == shards * rank
        and stack.a.stride()[1:] == (k, 1)
        and rank % BLOCK_R == 0
        and x.dtype == stack.a.dtype
    )
    if not fits:
        raise ValueError(f"lora_shrink: x {_form(x)}, {_form_of(stack)}")
    shape = shape_of(count)
    split = triton.cdiv(k, shape.slice_k)
    inner = torch.empty(
        split, count, TILE, shards * rank, dtype=torch.float32, device=x.device
    )
    if count:
        shrink_kernel[(count, shards * rank // BLOCK_R, split)](
            x,
            stack.a,
            stack.ranks,
            tiles.words,
            inner,
            x.stride(0),
            stack.a.stride(0),
            K=k,
            SHARDS=shards,
            SLICE_K=shape.slice_k,
            K_BLOCK=shape.block_k,
            num_warps=shape.shrink_warps,
            **_common(stack, x.device),
        )
    return inner


def lora_expand(
    y: Tensor, inner: Tensor, stack: AdapterStack, tiles: AdapterTiles
) -> Tensor:
    """`ops.lora.lora_expand`.

    Raises:
        ValueError: a shape or a dtype does not fit.
    """
    _check_expand("lora_expand", y, inner, stack, tiles)
    count = len(tiles.words)
    shape = shape_of(count)
    sizes = (*stack.sizes, 0, 0)
    blocks = sum(triton.cdiv(size, shape.block_n) for size in stack.sizes)
    if count:
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
            SHARDS=len(stack.sizes),
            SPLIT=len(inner),
            N_BLOCK=shape.block_n,
            num_warps=shape.expand_warps,
            **_common(stack, y.device),
        )
    return y


def lora_expand_gated(
    y: Tensor,
    inner: Tensor,
    stack: AdapterStack,
    tiles: AdapterTiles,
    activation: str,
) -> Tensor:
    """`ops.lora.lora_expand_gated`.

    Raises:
        ValueError: a shape or a dtype does not fit.
    """
    _check_expand("lora_expand_gated", y, inner, stack, tiles)
    width = y.shape[1] // 2
    if stack.sizes != (width, width):
        raise ValueError(f"lora_expand_gated: {_form_of(stack)}, expected gate and up")
    count = len(tiles.words)
    shape = shape_of(count)
    # A program has a block of both.
    block_n = shape.block_n // 2
    out = y.new_empty(len(y), width)
    if count:
        expand_gated_kernel[(count, triton.cdiv(width, block_n))](
            inner,
            stack.b,
            stack.ranks,
            tiles.words,
            y,
            out,
            len(y),
            y.stride(0),
            stack.b.stride(0),
            WIDTH=width,
            SPLIT=len(inner),
            N_BLOCK=block_n,
            GELU=IS_GELU[activation],
            num_warps=shape.expand_warps,
            **_common(stack, y.device),
        )
    return out


def _common(stack: AdapterStack, device: torch.device) -> dict[str, Any]:
    return {
        "RANK": stack.rank,
        "TILE_ROWS": TILE,
        "R_BLOCK": BLOCK_R,
        **launch_options(device),
    }


def _check_expand(
    op: str, y: Tensor, inner: Tensor, stack: AdapterStack, tiles: AdapterTiles
) -> None:
    rank, shards = stack.rank, len(stack.sizes)
    fits = (
        y.dim() == 2
        and y.shape[1] == stack.b.shape[1] == sum(stack.sizes)
        and y.stride(1) == 1
        and stack.b.stride()[1:] == (rank, 1)
        and rank % BLOCK_R == 0
        and 1 <= shards <= MAX_SHARDS
        and y.dtype == stack.b.dtype
        and inner.shape[1:] == (len(tiles.words), TILE, shards * rank)
        and inner.is_contiguous()
    )
    if not fits:
        raise ValueError(f"{op}: y {_form(y)}, inner {_form(inner)}, {_form_of(stack)}")


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _form_of(stack: AdapterStack) -> str:
    return f"a {_form(stack.a)}, b {_form(stack.b)}, shards {stack.sizes}"
