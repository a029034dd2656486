"""Triton kernels around products of many rows with quantised weights."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.ops.linear.triton_kernels import (
    INT4,
    as_scale,
    decode,
    decode_half,
    load_groups,
    zero_of,
)
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def round_rows_kernel(
    rows,
    codes,
    scales,
    row_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round one group of columns of one row [K] to e4m3. A group of zeros has scale 1.
    The scales of a group are neighbours: [groups, rows].

    Up to BLOCK columns are read once, more twice, the second time from the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start = group * GROUP
    stop = tl.minimum(start + GROUP, K)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    source = rows + row * row_stride
    target = codes + row * K
    own_scale = scales + group * tl.num_programs(0) + row
    if GROUP <= BLOCK:
        k = start + tl.arange(0, BLOCK)
        value = tl.load(source + k, mask=k < stop, other=0.0).to(tl.float32)
        scale = _scale_of(tl.max(tl.abs(value), axis=0), MOST)
        tl.store(target + k, _rounded(value, scale, target, MOST), mask=k < stop)
        tl.store(own_scale, scale)
    else:
        largest = 0.0
        for first in range(0, GROUP, BLOCK):
            k = start + first + tl.arange(0, BLOCK)
            value = tl.load(source + k, mask=k < stop, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(value), axis=0))
        scale = _scale_of(largest, MOST)
        tl.store(own_scale, scale)
        for first in range(0, GROUP, BLOCK):
            k = start + first + tl.arange(0, BLOCK)
            value = tl.load(source + k, mask=k < stop, other=0.0).to(tl.float32)
            tl.store(target + k, _rounded(value, scale, target, MOST), mask=k < stop)


@triton.jit
def _scale_of(largest, MOST: tl.constexpr):
    return tl.where(largest > 0.0, tl.maximum(largest / MOST, 1e-30), 1.0)


@triton.jit
def _rounded(value, scale, target, MOST: tl.constexpr):
    """Return values as codes, within MOST; NaN stays NaN."""
    value = value / scale
    value = tl.where(value > MOST, MOST, value)
    value = tl.where(value < -MOST, -MOST, value)
    return value.to(target.dtype.element_ty)


@triton.jit
def _scaled_half(nibble, scale, zero, PRODUCT: tl.constexpr):
    """Return the values of codes of 4 bits, float32."""
    zero = zero_of(zero, tl.float16, PRODUCT)
    value = decode_half(nibble, zero, tl.float16, PRODUCT.format).to(tl.float32)
    return value * as_scale(scale, PRODUCT.format)


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    zeros,
    plain,
    PRODUCT: tl.constexpr,
    PDL: tl.constexpr,
):
    """plain [N, K] = (decode(codes) - zeros) * scales, for block_k stored items of a
    row.

    PRODUCT: `Product`, of which k, block_k and what describes the weight are read.
    """
    K: tl.constexpr = PRODUCT.k
    FORMAT: tl.constexpr = PRODUCT.format
    PER_ITEM: tl.constexpr = 2 if FORMAT >= INT4 else 1
    # Items whose columns follow each other, and share a group if runs allow it.
    RUN: tl.constexpr = PRODUCT.run if FORMAT >= INT4 else 16
    RUNS: tl.constexpr = PRODUCT.block_k // RUN
    SHARED: tl.constexpr = PRODUCT.group_columns % (RUN * PER_ITEM) == 0
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * RUNS + tl.arange(0, RUNS)[:, None]
    item = first * RUN + tl.arange(0, RUN)[None, :]
    column = first * (RUN * PER_ITEM) + tl.arange(0, RUN)[None, :]
    inside = column < K
    let_next_start(PDL)
    # What lies past the end of a row is not stored.
    code = tl.load(codes + row * (K // PER_ITEM) + item, mask=inside)
    of_group = first * (RUN * PER_ITEM) if SHARED else column
    target = plain + row * K + column
    if FORMAT >= INT4:
        low, high = code & 15, code >> 4
        scale, zero = load_groups(scales, zeros, row, of_group, PRODUCT)
        low = _scaled_half(low, scale, zero, PRODUCT)
        if not SHARED:
            scale, zero = load_groups(scales, zeros, row, column + RUN, PRODUCT)
        high = _scaled_half(high, scale, zero, PRODUCT)
        wait_for_inputs(PDL)
        tl.store(target, low.to(plain.dtype.element_ty), mask=inside)
        tl.store(target + RUN, high.to(plain.dtype.element_ty), mask=inside)
    else:
        scale, _ = load_groups(scales, zeros, row, of_group, PRODUCT)
        value = decode(code, plain, FORMAT).to(tl.float32) * scale
        wait_for_inputs(PDL)
        tl.store(target, value.to(plain.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def block_product_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    out,
    rows,
    outputs,
    out_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of out [rows, outputs] from e4m3 x [rows, K], with scales
    [ceil(K / BLOCK), rows], and e4m3 weights [outputs, K], with a scale per
    BLOCK x BLOCK.

    TILE_N is at most BLOCK, so a tile has one scale of the weight per step. Neighbours
    in the order of programs share their weights.
    """
    GROUPS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    tiles_m = tl.cdiv(rows, TILE_M)
    pid = tl.program_id(0)
    m = (pid % tiles_m) * TILE_M + tl.arange(0, TILE_M)
    n = (pid // tiles_m) * TILE_N + tl.arange(0, TILE_N)
    row = tl.minimum(m, rows - 1).to(tl.int64)
    column = tl.minimum(n, outputs - 1).to(tl.int64)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    k = tl.arange(0, BLOCK)
    x_start = x + row[:, None] * K + k[None, :]
    w_start = weight + column[None, :] * K + k[:, None]
    w_scale = weight_scales + ((pid // tiles_m) * TILE_N // BLOCK).to(tl.int64) * GROUPS
    total = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    x_scale, of_weight = tl.load(x_scales + row), tl.load(w_scale)
    for group in range(0, GROUPS):
        # The next group's arrive during the products of this one.
        later = tl.minimum(group + 1, GROUPS - 1)
        later_x = tl.load(x_scales + later * rows + row)
        later_of_weight = tl.load(w_scale + later)
        first = group * BLOCK
        if K % BLOCK == 0:
            x_tile = tl.load(x_start + first)
            w_tile = tl.load(w_start + first)
        else:
            x_tile = tl.load(x_start + first, mask=(first + k < K)[None, :], other=0.0)
            w_tile = tl.load(w_start + first, mask=(first + k < K)[:, None], other=0.0)
        total += tl.dot(x_tile, w_tile) * (x_scale * of_weight)[:, None]
        x_scale, of_weight = later_x, later_of_weight
    if HAS_BIAS:
        total += tl.load(bias + column)[None, :].to(tl.float32)
    tl.store(
        out + row[:, None] * out_stride + n[None, :],
        total.to(out.dtype.element_ty),
        mask=(m < rows)[:, None] & (n < outputs)[None, :],
    )
