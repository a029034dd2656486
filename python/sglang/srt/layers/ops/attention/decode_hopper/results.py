"""Results of the decode kernel on Hopper. A row with one split is stored at once.
Partial results are added up by the last program of a row and head block to arrive.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang.srt.layers.ops.attention.shared.attend import Sums

_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def put_result(
    out,
    partials,
    counters,
    sinks,
    sums,
    row,
    head,
    is_member,
    split,
    active,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
    ADDED: gl.constexpr,
):
    """Store the result of a row with one split, or a partial result. Unless ADDED is 0,
    the last of a row's programs then adds up its splits."""
    D: gl.constexpr = SHAPE.head_dim
    acc, top, total = sums
    if active <= 1:
        put_heads(out, sinks, sums, row, head, is_member, active, D)
    else:
        LAYOUT: gl.constexpr = acc.type.layout
        channel = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT)), 0)
        cell = (row * (SHAPE.kv_heads * SHAPE.group) + head) * TILE.splits + split
        result = acc / gl.expand_dims(total, 1)
        cells = gl.expand_dims(cell * D, 1) + channel
        is_query = gl.expand_dims(is_member, 1)
        gl.store(partials.results + cells, result, mask=is_query)
        gl.store(partials.lse + cell, top + tl.log2(total), mask=is_member)
        if ADDED > 0:
            # All threads store before one thread announces it.
            tl.debug_barrier()
            counter = counters + row * gl.num_programs(0) + gl.program_id(0)
            arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == active - 1:
                gl.store(counter, 0)
                put_added(out, partials, sinks, row, active, SHAPE, TILE, ADDED)


@gluon.jit
def put_heads(out, sinks, sums, row, head, is_member, active, D: gl.constexpr):
    """Store the heads of a row that has elements in `active` splits."""
    acc, top, total = sums
    LAYOUT: gl.constexpr = acc.type.layout
    channel = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT)), 0)
    if sinks is not None:
        sink = gl.load(sinks + head, mask=is_member, other=0.0).to(gl.float32)
        total += gl.where(total == 0.0, 0.0, gl.exp2(sink * _LOG2_E - top))
    # `total` is zero only if the row reads nothing.
    result = acc / gl.expand_dims(gl.where(active > 0, total, 1.0), 1)
    cells = gl.expand_dims(row * out.stride + head * D, 1) + channel
    result = result.to(out.at.dtype.element_ty)
    gl.store(out.at + cells, result, mask=gl.expand_dims(is_member, 1))


@gluon.constexpr_function
def added_heads(group, block_h):
    """Return the heads of a block, padded to a power of two."""
    heads = 1
    while heads < min(group, block_h):
        heads *= 2
    return heads


@gluon.constexpr_function
def added_layout(heads, head_dim, warps):
    """Return a layout for [splits, heads, channels]. A thread has four channels; lanes
    and then warps cover channels and heads, and the rest of both covers splits."""
    channel_lanes = min(head_dim // 4, 32)
    channel_warps = min(head_dim // (4 * channel_lanes), warps)
    head_lanes = min(32 // channel_lanes, heads)
    head_warps = min(heads // head_lanes, warps // channel_warps)
    lanes = [32 // (channel_lanes * head_lanes), head_lanes, channel_lanes]
    places = [warps // (head_warps * channel_warps), head_warps, channel_warps]
    return gl.BlockedLayout([1, 1, 4], lanes, places, [2, 1, 0])


@gluon.jit
def put_added(
    out,
    partials,
    sinks,
    row,
    active,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
    ADDED: gl.constexpr,
):
    """Add up the partial results of a block of heads, ADDED splits at once and in
    order, so that the result does not depend on which program is last."""
    D: gl.constexpr = SHAPE.head_dim
    HEADS: gl.constexpr = added_heads(SHAPE.group, TILE.block_h)
    HEAD_BLOCKS: gl.constexpr = (SHAPE.group + TILE.block_h - 1) // TILE.block_h
    LAYOUT: gl.constexpr = added_layout(HEADS, D, gl.num_warps())
    # Slices of the layout: [splits, heads] and [heads, channels], and [heads] of each.
    CELLS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    SUMS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    OF_CELLS: gl.constexpr = gl.SliceLayout(0, CELLS)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)

    member = gl.program_id(0) % HEAD_BLOCKS * TILE.block_h
    member += gl.arange(0, HEADS, layout=OF_CELLS)
    is_member = member < SHAPE.group
    head = gl.program_id(0) // HEAD_BLOCKS * SHAPE.group + member
    first_cell = (row * (SHAPE.kv_heads * SHAPE.group) + head) * TILE.splits
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    channel = gl.expand_dims(gl.expand_dims(channel, 0), 1)

    top = gl.full([HEADS], float("-inf"), gl.float32, OF_CELLS)
    total = gl.zeros([HEADS], gl.float32, OF_CELLS)
    acc = gl.zeros([HEADS, D], gl.float32, SUMS)
    for first in range(0, active, ADDED):
        split = first + gl.arange(0, ADDED, layout=gl.SliceLayout(1, CELLS))
        is_read = gl.expand_dims(split < active, 1) & gl.expand_dims(is_member, 0)
        cell = gl.expand_dims(first_cell, 0) + gl.expand_dims(split, 1)
        # Other programs wrote them, so bypass this multiprocessor's L1.
        part = gl.load(
            partials.results + gl.expand_dims(cell * D, 2) + channel,
            mask=gl.expand_dims(is_read, 2),
            other=0.0,
            cache_modifier=".cg",
        )
        power = gl.load(
            partials.lse + cell,
            mask=is_read,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        new_top = gl.maximum(top, gl.max(power, 0))
        shrink = gl.exp2(top - new_top)
        weight = gl.exp2(power - gl.expand_dims(new_top, 0))
        total = total * shrink + gl.sum(weight, 0)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, OF_SUMS), 1)
        acc += gl.sum(part * gl.expand_dims(weight, 2), 0)
        top = new_top
    added = Sums(
        acc, gl.convert_layout(top, OF_SUMS), gl.convert_layout(total, OF_SUMS)
    )
    head = gl.convert_layout(head, OF_SUMS)
    is_member = gl.convert_layout(is_member, OF_SUMS)
    put_heads(out, sinks, added, row, head, is_member, active, D)
