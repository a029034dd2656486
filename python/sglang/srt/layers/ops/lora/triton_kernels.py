"""Triton kernels of the products of adapters.

`shrink_kernel` multiplies by A, in parts of the sum over K, unless the layer's own
product did. `expand_kernel` adds the parts, multiplies by B and adds to the layer's
product; `expand_gated_kernel` applies the activation as well. A program handles one
tile: tokens of one adapter. Nothing that changes from step to step is a launch
argument, so captured graphs work for all batches.

Adapters do not depend on the preceding kernel, so programs fetch them before they wait
for it. The sums of a token do not depend on the other tokens of its tile. `triton.py`
launches.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.ops.activation.triton import activated
from sglang.srt.layers.ops.linear.triton_kernels import prefetch_items
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs

BLOCK_R = 16
R_BLOCK = tl.constexpr(BLOCK_R)
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
def _first_weights(b_rows, rank, inside, RANK: tl.constexpr, PDL: tl.constexpr):
    """Return the first R_BLOCK columns of B, [R_BLOCK, N], and fetch some others."""
    if PDL and RANK > R_BLOCK and rank > R_BLOCK:
        prefetch_items(tl.trans(b_rows), 0, RANK, AHEAD)
    r = tl.arange(0, R_BLOCK)[:, None]
    return tl.load(b_rows + r, mask=inside & (rank > 0), other=0.0)


@triton.jit
def _inner_rows(
    inner,
    tile,
    slot,
    rows,
    inner_stride,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Return pointers [TILE_ROWS, 1] to the inner product of each row, whose parts are
    a launch's tiles apart.

    inner_stride: of rows, if JOINED.
    """
    if JOINED:
        place = rows.to(tl.int64) * inner_stride + (slot - 1) * WIDTH
    else:
        place = (tile * TILE_ROWS + tl.arange(0, TILE_ROWS)) * WIDTH
    return inner + place[:, None]


@triton.jit
def _inner_part(
    inner_rows,
    live,
    column,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Return the inner product of R_BLOCK columns, [TILE_ROWS, R_BLOCK]."""
    r = column + tl.arange(0, R_BLOCK)[None, :]
    total = tl.zeros([TILE_ROWS, R_BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLIT):
        part = inner_rows + split * tl.num_programs(0) * TILE_ROWS * WIDTH
        total += tl.load(part + r, mask=live, other=0.0).to(tl.float32)
    return total


@triton.jit
def _gained(
    inner_rows,
    live,
    shard,
    b_rows,
    weight,
    rank,
    inside,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    N_BLOCK: tl.constexpr,
):
    """Return inner[:, shard] . B, [TILE_ROWS, N_BLOCK]; `weight` is the first block of
    B."""
    total = tl.zeros([TILE_ROWS, N_BLOCK], dtype=tl.float32)
    if rank > 0:
        first = shard * RANK
        part = _inner_part(inner_rows, live, first, WIDTH, SPLIT, TILE_ROWS)
        part = part.to(weight.dtype)
        total = tl.dot(part, weight, total, input_precision="ieee")
        if RANK > R_BLOCK:
            for column in range(R_BLOCK, rank, R_BLOCK):
                part = _inner_part(
                    inner_rows, live, first + column, WIDTH, SPLIT, TILE_ROWS
                ).to(weight.dtype)
                r = column + tl.arange(0, R_BLOCK)
                later = tl.load(b_rows + r[:, None], mask=inside, other=0.0)
                total = tl.dot(part, later, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    inner,
    b,
    ranks,
    words,
    y,
    out,
    tokens,
    y_stride,
    out_stride,
    b_stride,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    N_BLOCK: tl.constexpr,
    JOINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row m, n] = y[row m, n] + inner[row m, shard of n] . b[slot, n].

    If JOINED, also for rows without an adapter; otherwise `out` is `y`.

    Args:
        inner: [T, slots * WIDTH] in the rows of y if JOINED, otherwise by tile and row.
        tokens: rows of y.

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
    weight = _first_weights(b_rows, rank, inside, RANK, PDL)
    wait_for_inputs(PDL)
    if rank > 0 or JOINED:
        live = ((rows >= 0) & (rows < tokens))[:, None]
        place = y + rows.to(tl.int64)[:, None] * y_stride + n[None, :]
        before = tl.load(place, mask=live & inside, other=0.0).to(tl.float32)
        total = _gained(
            _inner_rows(inner, tile, slot, rows, y_stride, WIDTH, TILE_ROWS, JOINED),
            live,
            shard,
            b_rows,
            weight,
            rank,
            inside,
            WIDTH,
            RANK,
            SPLIT,
            TILE_ROWS,
            N_BLOCK,
        )
        place = out + rows.to(tl.int64)[:, None] * out_stride + n[None, :]
        tl.store(place, (before + total).to(out.dtype.element_ty), mask=live & inside)


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
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    N_BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    JOINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row m, n] = activation(gate[n]) * up[n], where [gate | up] is y[row m] with
    the adapters' products added. Also for rows without an adapter.

    Args: as `expand_kernel`.

    Programs: (tiles, blocks of OUTPUTS).
    """
    let_next_start(PDL)
    WIDTH: tl.constexpr = 2 * RANK
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = _tile_slot(words, tile, TILE_ROWS)
    rank = tl.load(ranks + slot)
    rows = _tile_rows(words, tile, TILE_ROWS)
    n = block * N_BLOCK + tl.arange(0, N_BLOCK)
    inside = (n < OUTPUTS)[None, :]
    gate_rows = _b_rows(b, slot, b_stride, n, RANK)
    up_rows = _b_rows(b, slot, b_stride, OUTPUTS + n, RANK)
    gate_weight = _first_weights(gate_rows, rank, inside, RANK, PDL)
    up_weight = _first_weights(up_rows, rank, inside, RANK, PDL)
    wait_for_inputs(PDL)
    live = ((rows >= 0) & (rows < tokens))[:, None]
    mask = live & inside
    wide = rows.to(tl.int64)[:, None]
    place = y + wide * y_stride + n[None, :]
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + OUTPUTS, mask=mask, other=0.0).to(tl.float32)
    inner_rows = _inner_rows(
        inner, tile, slot, rows, y_stride, WIDTH, TILE_ROWS, JOINED
    )
    gate += _gained(
        inner_rows,
        live,
        0,
        gate_rows,
        gate_weight,
        rank,
        inside,
        WIDTH,
        RANK,
        SPLIT,
        TILE_ROWS,
        N_BLOCK,
    )
    up += _gained(
        inner_rows,
        live,
        1,
        up_rows,
        up_weight,
        rank,
        inside,
        WIDTH,
        RANK,
        SPLIT,
        TILE_ROWS,
        N_BLOCK,
    )
    # The activation gets the sum rounded as it would be stored.
    gate = gate.to(y.dtype.element_ty).to(tl.float32)
    up = up.to(y.dtype.element_ty).to(tl.float32)
    result = activated(gate, up, GELU)
    tl.store(
        out + wide * OUTPUTS + n[None, :], result.to(out.dtype.element_ty), mask=mask
    )
