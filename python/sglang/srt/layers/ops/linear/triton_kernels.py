"""Triton kernels of the weight-streaming matrix product for few rows.

Weights are plain or quantised; codes become values in registers. Both kernels read
every weight once, in long row segments, and sum in float32. Weights do not depend on
the preceding kernel, so their first bytes are prefetched before `wait_for_inputs`.
`triton.py` chooses and launches.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from sglang.srt.layers.ops.activation.triton import activated
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs

# What codes mean; integers, because constants in a tuple cannot be texts.
PLAIN = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E4M3_BITS = tl.constexpr(2)
INT4 = tl.constexpr(3)
MXFP4 = tl.constexpr(4)
FORMATS = {"plain": 0, "e4m3": 1, "e4m3_bits": 2, "int4": 3, "mxfp4": 4}
LINE_BITS = tl.constexpr(128 * 8)  # of a cache line


class Product(NamedTuple):
    """Constants that a kernel is compiled for; the PRODUCT argument of both kernels.

    Fields:
        k: columns of the weight [N, K].
        block_m, block_n, block_k: rows, weight rows and columns of a tile.
        gated: compute the activation of the gate half times the up half, not the
            product.
        gelu: the activation is GELU in its tanh form, not SiLU.
        has_bias, has_residual: whether to add them.
        format: what the weight's codes mean, from `FORMATS`.
        group_rows, group_columns: rows and columns that share a scale.
        groups: scales of a row.
        has_zeros: groups have zeros, too.
        run: columns between the halves of a byte (`QuantizedWeight`).
    """

    k: int
    block_m: int
    block_n: int
    block_k: int
    gated: bool
    gelu: bool
    has_bias: bool
    has_residual: bool
    format: int = 0
    group_rows: int = 1
    group_columns: int = 1
    groups: int = 1
    has_zeros: bool = False
    run: int = 1


@triton.jit
def decode(codes, like, FORMAT: tl.constexpr):
    """Return a tile of codes as values of the dtype of the tensor `like`, exactly."""
    if FORMAT == E4M3:
        return codes.to(like.dtype.element_ty)
    elif FORMAT == E4M3_BITS:
        # For devices without the type: the bits are those of a float16 / 256. NaN is
        # refused when weights are loaded.
        wide = codes.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True) * 256.0
        return value.to(like.dtype.element_ty)
    else:
        return codes


@triton.jit
def decode_half(nibble, zero, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Return codes of 4 bits, uint8, less their zeros as values of `dtype`, exactly.
    Half precision needs no conversion: the codes become mantissas.

    zero: from `zero_of`, broadcastable to the codes.
    """
    wide = nibble.to(tl.uint16)
    if FORMAT == INT4:
        if dtype == tl.bfloat16:
            value = (wide | 0x4300).to(tl.bfloat16, bitcast=True)  # 128 + code
        else:
            value = (wide | 0x6400).to(tl.float16, bitcast=True)  # 1024 + code
        return (value - zero.to(value.dtype)).to(dtype)
    else:
        # The bits are those of a float16 / 2 ** 14.
        half = ((wide & 8) << 12) | ((wide & 7) << 9)
        value = half.to(tl.float16, bitcast=True) * 16384.0
        return value.to(dtype)


@triton.jit
def zero_of(stored, dtype: tl.constexpr, PRODUCT: tl.constexpr):
    """Return what `decode_half` subtracts for groups, from their stored zeros."""
    offset = 136 if dtype == tl.bfloat16 else 1032
    if PRODUCT.has_zeros:
        return stored.to(tl.int32) + offset
    else:
        return stored.to(tl.int32) * 0 + offset


@triton.jit
def as_scale(stored, FORMAT: tl.constexpr):
    """Return stored scales as float32."""
    if FORMAT == MXFP4:
        # Exponents; 0 and 255, which is NaN, do not occur in a loaded checkpoint.
        return (stored.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    else:
        return stored


@triton.jit
def packed_product(
    codes,
    zero,
    x_start,
    column,
    x_mask,
    x,
    FORMAT: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Multiply codes of 4 bits, bytes [block_n, block_k / 2], with x: float32 [block_n,
    block_m], without their scale. They begin at `column`, and all have one group.

    zero: of each weight row, from `zero_of`. x_start: pointers [block_m, 1] to the rows
    of x. x_mask: of the rows that exist.
    """
    K: tl.constexpr = PRODUCT.k
    RUN: tl.constexpr = PRODUCT.run
    dtype: tl.constexpr = x.dtype.element_ty
    byte = tl.arange(0, PRODUCT.block_k // 2)[None, :]
    first = column + byte // RUN * (2 * RUN) + byte % RUN
    if K % PRODUCT.block_k != 0:
        x_mask = x_mask & (first < K)
    low = decode_half(codes & 15, zero[:, None], dtype, FORMAT)
    high = decode_half(codes >> 4, zero[:, None], dtype, FORMAT)
    x_tile = tl.load(x_start + first, mask=x_mask, other=0.0)
    total = tl.dot(low, tl.trans(x_tile), input_precision="ieee")
    x_tile = tl.load(x_start + first + RUN, mask=x_mask, other=0.0)
    return tl.dot(high, tl.trans(x_tile), total, input_precision="ieee")


@triton.jit
def row_scales(scales, row, PRODUCT: tl.constexpr):
    """Return the scale of each weight row (int64), if a row has one."""
    return as_scale(tl.load(scales + row // PRODUCT.group_rows), PRODUCT.format)


@triton.jit
def load_groups(scales, zeros, row, column, PRODUCT: tl.constexpr):
    """Load (scale, zero) of each weight row (int64) in the group of a column, or in the
    last one, as they are stored: nothing waits for them here."""
    group = tl.minimum(column // PRODUCT.group_columns, PRODUCT.groups - 1)
    place = (row // PRODUCT.group_rows) * PRODUCT.groups + group
    scale = tl.load(scales + place)
    zero = tl.load(zeros + place) if PRODUCT.has_zeros else scale
    return scale, zero


@triton.jit
def _add_stored(
    total, start, scale, zero, x_start, block, is_row, x, PRODUCT: tl.constexpr
):
    """Add a step of the sum over K of codes, scaled if its columns have a scale of
    their own."""
    K: tl.constexpr = PRODUCT.k
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    first = block * BLOCK_K
    if PRODUCT.format >= INT4:
        zero = zero_of(zero, x.dtype.element_ty, PRODUCT)
        item = block * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)[None, :]
        if K % BLOCK_K == 0:
            codes = tl.load(start + item)
        else:
            codes = tl.load(start + item, mask=item < K // 2, other=0)
        part = packed_product(
            codes, zero, x_start, first, is_row, x, PRODUCT.format, PRODUCT
        )
    else:
        k = first + tl.arange(0, BLOCK_K)[None, :]
        if K % BLOCK_K == 0:
            w_tile = tl.load(start + k)
            x_tile = tl.load(x_start + k, mask=is_row, other=0.0)
        else:
            w_tile = tl.load(start + k, mask=k < K, other=0.0)
            x_tile = tl.load(x_start + k, mask=is_row & (k < K), other=0.0)
        part = tl.dot(decode(w_tile, x, PRODUCT.format), tl.trans(x_tile))
    if PRODUCT.groups > 1:
        part *= as_scale(scale, PRODUCT.format)[:, None]
    return total + part


@triton.jit
def _weight_rows(tile, outputs, PRODUCT: tl.constexpr):
    """Return the weight row of each row of the tile; rows past the end repeat the last.

    If gated, gate and up rows alternate, so that one program reduces each pair.
    """
    row = tile * PRODUCT.block_n + tl.arange(0, PRODUCT.block_n)
    if PRODUCT.gated:
        row = tl.minimum(row // 2, outputs - 1) + (row % 2) * outputs
    else:
        row = tl.minimum(row, outputs - 1)
    return row.to(tl.int64)


@triton.jit
def prefetch(address):
    """Fetch the cache line at each int64 address into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_items(start, first, ITEMS: tl.constexpr, BLOCK: tl.constexpr):
    """Fetch the items first .. first + BLOCK of rows into L2.

    start: pointers [rows, 1] to the first of ITEMS stored items of each row. Past the
    end of a row its last item is fetched instead. BLOCK may be less than a cache line.
    """
    LINE: tl.constexpr = LINE_BITS // start.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (BLOCK + LINE - 1) // LINE
    item = first + tl.arange(0, LINES)[None, :] * LINE
    prefetch((start + tl.minimum(item, ITEMS - 1)).to(tl.int64, bitcast=True))


@triton.jit
def _finish(
    total,
    tile,
    scales,
    bias,
    residual,
    out,
    rows,
    outputs,
    residual_stride,
    out_stride,
    PRODUCT: tl.constexpr,
):
    """Run the epilogue and store a tile of sums, [block_n, block_m] float32."""
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    if PRODUCT.format != PLAIN and PRODUCT.groups == 1:
        row = _weight_rows(tile, outputs, PRODUCT)
        total *= row_scales(scales, row, PRODUCT)[:, None]
    m = tl.arange(0, BLOCK_M)[None, :]
    if PRODUCT.gated:
        pairs = total.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1)
        gate, up = tl.split(pairs)
        # The activation gets the product rounded as it would be stored.
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        result = activated(gate, up, PRODUCT.gelu)
        n = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[:, None]
    else:
        result = total
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    mask = (n < outputs) & (m < rows)
    if PRODUCT.has_bias:
        result += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    if PRODUCT.has_residual:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        added = tl.load(residual + m * residual_stride + n, mask=mask, other=0.0)
        result += added.to(tl.float32)
    tl.store(out + m * out_stride + n, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gemv_kernel(
    x,
    weight,
    scales,
    bias,
    residual,
    out,
    outputs,
    PRODUCT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one row of x. Tiles go to registers, and the next one is loaded before
    the current one is used."""
    K: tl.constexpr = PRODUCT.k
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    tile = tl.program_id(0)
    let_next_start(PDL)
    k = tl.arange(0, BLOCK_K)
    start = weight + _weight_rows(tile, outputs, PRODUCT)[:, None] * K
    ahead = tl.load(start + k[None, :], mask=(k < K)[None, :], other=0.0)
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        current = ahead
        here = first + k
        later = here + BLOCK_K
        ahead = tl.load(start + later[None, :], mask=(later < K)[None, :], other=0.0)
        value = tl.load(x + here, mask=here < K, other=0.0).to(tl.float32)
        total += decode(current, x, PRODUCT.format).to(tl.float32) * value[None, :]
    _finish(
        tl.sum(total, axis=1)[:, None],
        tile,
        scales,
        bias,
        residual,
        out,
        1,
        outputs,
        0,
        0,
        PRODUCT,
    )


@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    residual,
    out,
    partial,
    counters,
    rows,
    outputs,
    x_stride,
    residual_stride,
    out_stride,
    PRODUCT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply up to block_m rows of x on the matrix units, with the weight as the tall
    operand.

    K is split over SPLIT_K programs. The last one to arrive adds the partial sums in
    the order of the splits, so that the result does not depend on which program is
    last.
    """
    K: tl.constexpr = PRODUCT.k
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    tile = tl.program_id(0)
    split = tl.program_id(1)
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first = BLOCKS * split // SPLIT_K
    last = BLOCKS * (split + 1) // SPLIT_K
    let_next_start(PDL)
    row = _weight_rows(tile, outputs, PRODUCT)
    PER_ITEM: tl.constexpr = 2 if PRODUCT.format >= INT4 else 1
    start = weight + row[:, None] * (K // PER_ITEM)
    if PDL:
        ITEMS: tl.constexpr = BLOCK_K // PER_ITEM
        for ahead in tl.static_range(PREFETCH):
            prefetch_items(start, (first + ahead) * ITEMS, K // PER_ITEM, ITEMS)
    wait_for_inputs(PDL)
    k = tl.arange(0, BLOCK_K)[None, :]
    m = tl.arange(0, BLOCK_M)[:, None]
    x_start = x + m * x_stride
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if PRODUCT.format != PLAIN:
        scale, zero = load_groups(scales, zeros, row, first * BLOCK_K, PRODUCT)
    for block in tl.range(first, last, num_stages=STAGES):
        here = block * BLOCK_K + k
        if PRODUCT.format != PLAIN:
            if PRODUCT.groups > 1:
                # The next step's arrive during the products of this one. Those of two
                # steps later would keep the compiler from copying ahead.
                later, later_zero = load_groups(
                    scales, zeros, row, (block + 1) * BLOCK_K, PRODUCT
                )
            total = _add_stored(
                total, start, scale, zero, x_start, block, m < rows, x, PRODUCT
            )
            if PRODUCT.groups > 1:
                scale, zero = later, later_zero
        else:
            if K % BLOCK_K == 0:
                w_tile = tl.load(start + here)
                x_tile = tl.load(x_start + here, mask=m < rows, other=0.0)
            else:
                w_tile = tl.load(start + here, mask=here < K, other=0.0)
                x_tile = tl.load(
                    x_start + here, mask=(m < rows) & (here < K), other=0.0
                )
            total = tl.dot(w_tile, tl.trans(x_tile), total)
    if SPLIT_K > 1:
        n = tl.arange(0, BLOCK_N)[:, None]
        column = tl.arange(0, BLOCK_M)[None, :]
        mine = partial + (tile * SPLIT_K) * (BLOCK_M * BLOCK_N) + column * BLOCK_N + n
        inside = (column < rows) & (n < BLOCK_N)
        tl.store(mine + split * (BLOCK_M * BLOCK_N), total, mask=inside)
        # All threads store before one thread announces it.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT_K - 1:
            tl.store(counters + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for other in tl.static_range(SPLIT_K):
                total += tl.load(
                    mine + other * (BLOCK_M * BLOCK_N),
                    mask=(column < rows) & (n < BLOCK_N),
                    other=0.0,
                    cache_modifier=".cg",
                )
            _finish(
                total,
                tile,
                scales,
                bias,
                residual,
                out,
                rows,
                outputs,
                residual_stride,
                out_stride,
                PRODUCT,
            )
    else:
        _finish(
            total,
            tile,
            scales,
            bias,
            residual,
            out,
            rows,
            outputs,
            residual_stride,
            out_stride,
            PRODUCT,
        )
