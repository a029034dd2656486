"""Triton kernels of split-KV paged decode attention: partial softmax, then combine.

Everything they need arrives as an argument; grids depend on shapes, never on lengths.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import triton
import triton.language as tl

from sglang.srt.layers.ops.attention.decode.checked import Compared, attend_checked
from sglang.srt.layers.ops.attention.shared.args import Compares
from sglang.srt.layers.ops.attention.shared.attend import (
    Sums,
    empty_sums,
    weights_of_read,
    with_sink,
)
from sglang.srt.layers.ops.attention.shared.elements import (
    find_table_row,
    page_at,
    page_to_slots,
    row_kv,
)
from sglang.srt.layers.ops.stored_kv import read_value

NEVER = tl.constexpr(int(Compares.NEVER))
ALWAYS = tl.constexpr(int(Compares.ALWAYS))


@triton.jit
def split_plan(read_len, window, TILE: tl.constexpr):
    """Return the first attended element, elements per split, and splits that have
    any."""
    begin = read_len * 0
    if window is not None:
        begin = tl.maximum(read_len - window, 0)
    tiles = tl.cdiv(read_len - begin, TILE.block_n)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, TILE.splits), TILE.least_tiles)
    return begin, tiles_per_split * TILE.block_n, tl.cdiv(tiles, tiles_per_split)


@triton.jit
def attend_range(
    sums,
    query,
    begin,
    end,
    kv,
    scale,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold elements [begin, end), which all queries attend, into the sums."""
    acc, top, total = sums
    for start in range(begin, end, BLOCK_N):
        element = start + tl.arange(0, BLOCK_N)
        is_read = element < end
        page = tl.load(page_at(kv, element, PAGE_SIZE), mask=is_read, other=0)
        slot = page_to_slots(page, element, PAGE_SIZE)
        # Slots past the end may hold NaN, which a zero weight would not silence.
        is_loaded = is_read[:, None] & kv.is_channel[None, :]
        k = tl.load(kv.k + slot * kv.k_stride, mask=is_loaded, other=0.0)
        k = read_value(k, query.dtype)
        weight, shrink, top = weights_of_read(query, k, is_read, top, scale)
        v = tl.load(kv.v + slot * kv.v_stride, mask=is_loaded, other=0.0)
        v = read_value(v, query.dtype)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return Sums(acc, top, total)


@triton.jit
def attend_compared(
    sums,
    query,
    begin,
    end,
    kv,
    scale,
    of,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    COMPARES: tl.constexpr,
):
    """`attend_range` that also compares the bytes of the `Compared` `of`, as COMPARES
    says."""
    if COMPARES == NEVER:
        return attend_range(
            sums, query, begin, end, kv, scale, SHAPE.page_size, TILE.block_n
        )
    elif COMPARES == ALWAYS:
        return attend_checked(
            sums, query, begin, end, kv, scale, of, SHAPE, TILE, IN_TURN=False
        )
    else:
        acc, top, total = sums
        if tl.load(of.check.state.clock) % of.check.layers == of.layer:
            acc, top, total = attend_checked(
                sums, query, begin, end, kv, scale, of, SHAPE, TILE, IN_TURN=True
            )
        else:
            acc, top, total = attend_range(
                sums, query, begin, end, kv, scale, SHAPE.page_size, TILE.block_n
            )
        return Sums(acc, top, total)


@triton.jit(do_not_specialize=["window", "layer"])
def decode_split_kernel(
    q,
    out,
    partials,
    pool,
    pages,
    read_lens,
    sinks,
    scale,
    window,
    check,
    layer,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    COMPARES: tl.constexpr,
):
    """Attention of one block of query heads over one split of one row's KV elements.

    Grid: (KV heads x blocks of a group's query heads, TILE.splits, rows). If a row fits
    one split, it is written to `out` and not to `partials`.

    Args:
        q, out: `args.Tokens`. partials, pool, pages: types of the same names in `args`.
        read_lens: int64 [R], elements of each row.
        sinks: [query heads] logits without a value, or None.
        scale: `args.Scale`.
        window: most elements that a row attends, or None.
        check, layer: `args.Check`, and the layer's number in it; None without COMPARES.
        SHAPE: `args.Shape`. TILE: `args.DecodeTile`. COMPARES: an `args.Compares`.
    """
    HEAD_BLOCKS: tl.constexpr = (SHAPE.group + TILE.block_h - 1) // TILE.block_h
    kv_head = tl.program_id(0) // HEAD_BLOCKS
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    read_len = tl.load(read_lens + row).to(tl.int32)
    first, per_split, active = split_plan(read_len, window, TILE)
    if split >= tl.maximum(active, 1):
        return
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, read_len)

    member = (tl.program_id(0) % HEAD_BLOCKS) * TILE.block_h
    member += tl.arange(0, TILE.block_h)
    head = kv_head * SHAPE.group + member
    channel = tl.arange(0, SHAPE.block_d)
    is_channel = channel < SHAPE.head_dim
    is_query = (member < SHAPE.group)[:, None] & is_channel[None, :]
    query = tl.load(
        q.at + row * q.stride + head[:, None] * SHAPE.head_dim + channel[None, :],
        mask=is_query,
        other=0.0,
    )

    table_row = find_table_row(pages, row)
    kv = row_kv(pool, pages, table_row, kv_head, channel, is_channel)
    sums = empty_sums(TILE.block_h, SHAPE.block_d)
    acc, top, total = attend_compared(
        sums,
        query,
        begin,
        end,
        kv,
        scale,
        Compared(check=check, row=row, layer=layer, kv_head=kv_head),
        SHAPE,
        TILE,
        COMPARES,
    )

    if active <= 1:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=member < SHAPE.group, other=0.0)
            total = with_sink(total, top, sink)
        # `total` is zero only if the row reads nothing.
        result = acc / tl.where(read_len > 0, total, 1.0)[:, None]
        at = out.at + row * out.stride + head[:, None] * SHAPE.head_dim
        result = result.to(out.at.dtype.element_ty)
        tl.store(at + channel[None, :], result, mask=is_query)
    else:
        cell = (row * (SHAPE.kv_heads * SHAPE.group) + head) * TILE.splits + split
        tl.store(
            partials.results + cell[:, None] * SHAPE.head_dim + channel[None, :],
            acc / total[:, None],
            mask=is_query,
        )
        is_head = member < SHAPE.group
        tl.store(partials.lse + cell, top + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["window"])
def decode_combine_kernel(
    partials,
    read_lens,
    sinks,
    out,
    window,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """out = average of a row's partial results, weighted by their softmax sums; a sink
    adds its weight to their sum.

    Grid: (query heads, rows). Splits that were not written are not read.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    read_len = tl.load(read_lens + row).to(tl.int32)
    _, _, active = split_plan(read_len, window, TILE)
    if active <= 1:
        return
    split = tl.arange(0, TILE.splits)
    channel = tl.arange(0, SHAPE.block_d)
    is_channel = channel < SHAPE.head_dim
    is_active = split < active
    cell = (row * (SHAPE.kv_heads * SHAPE.group) + head) * TILE.splits + split
    power = tl.load(partials.lse + cell, mask=is_active, other=float("-inf"))
    top = tl.max(power, 0)
    weight = tl.exp2(power - top)
    part = tl.load(
        partials.results + cell[:, None] * SHAPE.head_dim + channel[None, :],
        mask=is_active[:, None] & is_channel[None, :],
        other=0.0,
    )
    total = tl.sum(weight, 0)
    if sinks is not None:
        total = with_sink(total, top, tl.load(sinks + head))
    result = tl.sum(part * weight[:, None], 0) / total
    tl.store(
        out.at + row * out.stride + head * SHAPE.head_dim + channel,
        result.to(out.at.dtype.element_ty),
        mask=is_channel,
    )
