"""Triton kernels of split-KV paged decode attention: partial softmax, then combine.

Everything they know arrives as an argument; grids depend on shapes, never on lengths.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _split_plan(
    read_len,
    window,
    HAS_WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """First attended element, elements per split, and how many splits have any."""
    begin = read_len * 0
    if HAS_WINDOW:
        begin = tl.maximum(read_len - window, 0)
    tiles = tl.cdiv(read_len - begin, BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    return begin, tiles_per_split * BLOCK_N, tl.cdiv(tiles, tiles_per_split)


@triton.jit(do_not_specialize=["window"])
def decode_split_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    row_index,
    read_lens,
    out,
    partial,
    lse,
    score_scale,
    window,
    q_row_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    table_row_stride,
    table_column_stride,
    out_row_stride,
    Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_ROW_INDEX: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attention of one block of query heads over one split of one row's KV elements.

    Grid: (KV heads x blocks of a group's query heads, SPLITS, rows). `score_scale` is
    sm_scale * log2(e): exponents are powers of two, and so are those of `lse`. A row
    that fits one split is written to `out` and not to `partial`.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // HEAD_BLOCKS
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    read_len = tl.load(read_lens + row).to(tl.int32)
    first, per_split, active = _split_plan(
        read_len, window, HAS_WINDOW, SPLITS, BLOCK_N
    )
    if split >= tl.maximum(active, 1):
        return
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, read_len)

    member = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + member
    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < HEAD_DIM
    is_query = (member < GROUP)[:, None] & is_channel[None, :]
    query = tl.load(
        q + row * q_row_stride + head[:, None] * HEAD_DIM + channel[None, :],
        mask=is_query,
        other=0.0,
    )

    table_row = row
    if HAS_ROW_INDEX:
        table_row = tl.load(row_index + row)
    table = page_table + table_row * table_row_stride
    k_base = k_cache + kv_head.to(tl.int64) * k_head_stride + channel[None, :]
    v_base = v_cache + kv_head.to(tl.int64) * v_head_stride + channel[None, :]

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        element = start + tl.arange(0, BLOCK_N)
        is_read = element < end
        page = tl.load(
            table + (element // PAGE_SIZE).to(tl.int64) * table_column_stride,
            mask=is_read,
            other=0,
        )
        slot = (page + element % PAGE_SIZE).to(tl.int64)[:, None]
        # Slots past the end may hold NaN, which a weight of zero would not silence.
        is_loaded = is_read[:, None] & is_channel[None, :]
        k = tl.load(k_base + slot * k_slot_stride, mask=is_loaded, other=0.0)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * score_scale
        score = tl.where(is_read[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        v = tl.load(v_base + slot * v_slot_stride, mask=is_loaded, other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top

    if active <= 1:
        # `total` is zero only where the row reads nothing.
        result = acc / tl.where(read_len > 0, total, 1.0)[:, None]
        tl.store(
            out + row * out_row_stride + head[:, None] * HEAD_DIM + channel[None, :],
            result.to(out.dtype.element_ty),
            mask=is_query,
        )
    else:
        cell = (row * Q_HEADS + head) * SPLITS + split
        tl.store(
            partial + cell[:, None] * HEAD_DIM + channel[None, :],
            acc / total[:, None],
            mask=is_query,
        )
        tl.store(lse + cell, top + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["window"])
def decode_combine_kernel(
    partial,
    lse,
    read_lens,
    out,
    window,
    out_row_stride,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = average of a row's partial results, weighted by their softmax sums.

    Grid: (query heads, rows). Splits that were not written are not read.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    read_len = tl.load(read_lens + row).to(tl.int32)
    _, _, active = _split_plan(read_len, window, HAS_WINDOW, SPLITS, BLOCK_N)
    if active <= 1:
        return
    split = tl.arange(0, SPLITS)
    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < HEAD_DIM
    is_active = split < active
    cell = (row * Q_HEADS + head) * SPLITS + split
    power = tl.load(lse + cell, mask=is_active, other=float("-inf"))
    weight = tl.exp2(power - tl.max(power, 0))
    part = tl.load(
        partial + cell[:, None] * HEAD_DIM + channel[None, :],
        mask=is_active[:, None] & is_channel[None, :],
        other=0.0,
    )
    result = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(
        out + row * out_row_stride + head * HEAD_DIM + channel,
        result.to(out.dtype.element_ty),
        mask=is_channel,
    )
