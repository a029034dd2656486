"""Triton kernels of the experts: products of every expert's rows, and the sum.

Each output is one float32 sum over ascending K in steps of one size, on the matrix
units with the weight as the tall operand. No two programs share a sum, so a token's
result does not depend on the rest of the batch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from sglang.srt.layers.ops.linear.triton_kernels import (
    INT4,
    PLAIN,
    as_scale,
    decode,
    load_groups,
    packed_product,
    zero_of,
)
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


class GroupedProduct(NamedTuple):
    """Constants that `grouped_kernel` is compiled for; its argument PRODUCT.

    Fields:
        k: inputs; outputs: columns of the result.
        block_m, block_n, block_k: tile of rows, of outputs and of inputs.
        experts: blocks with this expert or a higher one have no rows.
        top_k: assignments per row of x; 1 if x has a row for each assignment.
        gated: the weight has the rows of the gate, then of up, and the result is the
            activation. Otherwise it is the product times the assignment's weight.
        clamped: the activation is `SwiGLUClamp`.
        has_bias: whether there is a bias.
        direct: block i is assignment i, without a list of rows; there is one token.
        addends: products of the one token, which the last program of a tile to arrive
            adds; 0 if none does.
        format, group_rows, group_columns, groups, has_zeros, run: of the weight, as in
            `Product`.
    """

    k: int
    outputs: int
    block_m: int
    block_n: int
    block_k: int
    experts: int
    top_k: int
    gated: bool
    clamped: bool
    has_bias: bool
    direct: bool
    addends: int
    format: int = 0
    group_rows: int = 1
    group_columns: int = 1
    groups: int = 1
    has_zeros: bool = False
    run: int = 1


@triton.jit
def _block_rows(rows, block_experts, block, assignments, PRODUCT: tl.constexpr):
    """Return (the block's assignments [block_m], its expert)."""
    owner = tl.load(block_experts + block)
    m = tl.arange(0, PRODUCT.block_m)
    if PRODUCT.direct:
        row = tl.where(m == 0, block, assignments)
    else:
        row = tl.load(rows + block * PRODUCT.block_m + m)
    return row, owner


@triton.jit
def _columns(start, here, mask, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load columns `here` of the rows at `start`; zeros where masked and beyond K."""
    if K % BLOCK_K != 0:
        mask = mask & (here < K)
    return tl.load(start + here, mask=mask, other=0.0)


@triton.jit
def expert_scales(scales, row, first, PRODUCT: tl.constexpr):
    """Return the scales of an expert's rows [block_n, 1] in the group of column
    `first`."""
    start = scales + (row // PRODUCT.group_rows) * PRODUCT.groups
    scale = tl.load(start + first // PRODUCT.group_columns)
    return as_scale(scale, PRODUCT.format)


@triton.jit
def _add_packed(
    total,
    w_start,
    scales,
    zeros,
    row,
    x_start,
    first,
    is_row,
    x,
    PRODUCT: tl.constexpr,
):
    """`_add_product` of codes of 4 bits."""
    item = first // 2 + tl.arange(0, PRODUCT.block_k // 2)[None, :]
    codes = tl.load(w_start + item, mask=item < PRODUCT.k // 2, other=0)
    row = tl.reshape(row, (PRODUCT.block_n,))
    scale, zero = load_groups(scales, zeros, row, first, PRODUCT)
    part = packed_product(
        codes,
        zero_of(zero, x.dtype.element_ty, PRODUCT),
        x_start,
        first,
        is_row,
        x,
        PRODUCT.format,
        PRODUCT,
    )
    if PRODUCT.groups > 1:
        part *= as_scale(scale, PRODUCT.format)[:, None]
    return total + part


@triton.jit
def _add_product(total, w_tile, x_tile, scales, row, first, x, PRODUCT: tl.constexpr):
    """Add a step of the sum over K, scaled if its columns have a scale of their own."""
    w_tile = decode(w_tile, x, PRODUCT.format)
    if PRODUCT.groups == 1:
        return tl.dot(w_tile, x_tile, total, input_precision="ieee")
    part = tl.dot(w_tile, x_tile, input_precision="ieee")
    return total + part * expert_scales(scales, row, first, PRODUCT)


@triton.jit
def activate(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up) + 1.0
        return gate / (1.0 + tl.exp(-alpha * gate)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _bias(bias, owner, n, size, inside):
    """Load one expert's biases, [block_n, 1] float32."""
    return tl.load(bias + owner * size + n, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["assignments"])
def grouped_kernel(
    x,
    weight,
    weight_scales,
    weight_zeros,
    bias,
    rows,
    block_experts,
    scales,
    out,
    sums,
    counters,
    assignments,
    alpha,
    limit,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of outputs for one block of rows.

    out [assignments, outputs]; x [assignments / top_k, k]; weight [E, outputs, k], or
    [E, 2 * outputs, k] if gated, plain or codes with `weight_scales`; scales
    [assignments] float32, read unless gated.
    With PRODUCT.addends: sums [outputs]; counters [tiles], zero before and after.
    """
    K: tl.constexpr = PRODUCT.k
    N: tl.constexpr = PRODUCT.outputs
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    ROWS: tl.constexpr = 2 * N if PRODUCT.gated else N
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row, owner = _block_rows(
        rows, block_experts, tl.program_id(1), assignments, PRODUCT
    )
    if owner >= PRODUCT.experts:
        return
    owner = owner.to(tl.int64)
    is_row = (row < assignments)[:, None]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    # Rows past the end repeat the last one and are not stored.
    gate_row = tl.minimum(n, N - 1)
    PACKED: tl.constexpr = PRODUCT.format >= INT4
    PER_ITEM: tl.constexpr = 2 if PACKED else 1
    w_start = weight + (owner * ROWS + gate_row) * (K // PER_ITEM)
    groups = (ROWS + PRODUCT.group_rows - 1) // PRODUCT.group_rows * PRODUCT.groups
    weight_scales += owner * groups
    weight_zeros += owner * groups
    x_start = x + (row // PRODUCT.top_k).to(tl.int64)[:, None] * K
    k = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        here = first + k
        if PACKED:
            total = _add_packed(
                total,
                w_start,
                weight_scales,
                weight_zeros,
                gate_row,
                x_start,
                first,
                is_row,
                x,
                PRODUCT,
            )
            if PRODUCT.gated:
                up_total = _add_packed(
                    up_total,
                    w_start + N * (K // 2),
                    weight_scales,
                    weight_zeros,
                    gate_row + N,
                    x_start,
                    first,
                    is_row,
                    x,
                    PRODUCT,
                )
        else:
            x_tile = tl.trans(_columns(x_start, here, is_row, K, BLOCK_K))
            w_tile = _columns(w_start, here, True, K, BLOCK_K)
            total = _add_product(
                total, w_tile, x_tile, weight_scales, gate_row, first, x, PRODUCT
            )
            if PRODUCT.gated:
                w_tile = _columns(w_start + N * K, here, True, K, BLOCK_K)
                up_total = _add_product(
                    up_total,
                    w_tile,
                    x_tile,
                    weight_scales,
                    gate_row + N,
                    first,
                    x,
                    PRODUCT,
                )
    if PRODUCT.format != PLAIN and PRODUCT.groups == 1:
        total *= expert_scales(weight_scales, gate_row, 0, PRODUCT)
        if PRODUCT.gated:
            up_total *= expert_scales(weight_scales, gate_row + N, 0, PRODUCT)
    is_output = n < N
    if PRODUCT.has_bias:
        total += _bias(bias, owner, n, ROWS, is_output)
    if PRODUCT.gated:
        if PRODUCT.has_bias:
            up_total += _bias(bias, owner, n + N, ROWS, is_output)
        total = activate(total, up_total, alpha, limit, PRODUCT.clamped)
    else:
        total *= tl.load(scales + row, mask=row < assignments, other=0.0)[None, :]
    tl.store(
        out + row.to(tl.int64)[None, :] * N + n,
        total.to(out.dtype.element_ty),
        mask=is_output & (row < assignments)[None, :],
    )
    if PRODUCT.addends > 0:
        # All threads store before one thread announces it.
        tl.debug_barrier()
        tile = tl.program_id(0)
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == PRODUCT.addends - 1:
            tl.store(counters + tile, 0)
            channel = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            _sum_products(out, sums, channel, PRODUCT.addends, N)


@triton.jit
def _sum_products(products, out, channel, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """out [WIDTH] = products [TOP_K, WIDTH] summed in order, in float32."""
    mask = channel < WIDTH
    total = tl.zeros_like(channel).to(tl.float32)
    for slot in tl.static_range(TOP_K):
        # Other multiprocessors may have written them in this launch.
        product = tl.load(
            products + slot * WIDTH + channel,
            mask=mask,
            other=0.0,
            cache_modifier=".cg",
        )
        total += product.to(tl.float32)
    tl.store(out + channel, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    products,
    out,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, WIDTH] = products [T, TOP_K, WIDTH] summed in order, in float32."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    products += token * TOP_K * WIDTH
    _sum_products(products, out + token * WIDTH, channel, TOP_K, WIDTH)
