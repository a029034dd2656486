"""Work of the Hopper kernel's programs, and the shared memory its warps hand over.

one warp                          two warpgroups
wait empty[i] -> copy -> ready[i]   wait ready[i] -> multiply -> empty[i]
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from sglang.srt.layers.ops.attention.extend_hopper.plan import PLAN_COLUMNS

_PLAN_COLUMNS = gl.constexpr(PLAN_COLUMNS)


class Tiles(NamedTuple):
    """Tensor descriptors: q and out as [T, heads * D] in tiles of half a program's
    queries; new K and V as [T, KV heads * D] and prefix K and V as [elements, KV heads
    * D], in tiles of a block."""

    q: Any
    out: Any
    k_new: Any
    v_new: Any
    k_prefix: Any
    v_prefix: Any


class Rings(NamedTuple):
    """Shared memory, and the barriers that hand it over.

    Fields:
        q: [2 tiles x 2 halves, queries, D]; results leave through it.
        k, v: [STAGES, block, D].
        *_ready: the copy engine filled a place. *_empty: both halves have read it.
    """

    q: Any
    k: Any
    v: Any
    q_ready: Any
    q_empty: Any
    k_ready: Any
    k_empty: Any
    v_ready: Any
    v_empty: Any


class RingWork(NamedTuple):
    """A tile of queries of one head: a row of `ExtendPlan.tiles`, and the head."""

    first: Any
    tokens: Any
    partial: Any
    full: Any
    before: Any
    prefix_row: Any
    head: Any


class Share(NamedTuple):
    """The work of a program: `first`, `first` + `stride`, ... below `items`."""

    plan: Any
    first: Any
    items: Any
    stride: Any


@gluon.jit
def load_work(share, item, HEADS: gl.constexpr):
    """Return the work with number `item`. Heads of one tile are neighbours and share K
    and V."""
    number = gl.minimum(item, share.items - 1)
    at = share.plan + number // HEADS * _PLAN_COLUMNS
    return RingWork(
        first=gl.load(at),
        tokens=gl.load(at + 1),
        partial=gl.load(at + 2),
        full=gl.load(at + 3),
        before=gl.load(at + 4),
        prefix_row=gl.load(at + 5),
        head=item % HEADS,
    )


@gluon.jit
def fill_block(
    new, prefix, is_new, new_row, prefix_row, channel, ring, ready, empty, at
):
    """Fetch a block of new tokens or of a prefix into place `at` of a ring."""
    STAGES: gl.constexpr = ring.shape[0]
    BYTES: gl.constexpr = ring.shape[1] * ring.shape[2] * 2
    place = ring.index(at % STAGES)
    barrier = ready.index(at % STAGES)
    mbarrier.wait(empty.index(at % STAGES), ((at // STAGES) & 1) ^ 1)
    mbarrier.expect(barrier, BYTES)
    tma.async_copy_global_to_shared(
        new, [new_row, channel], barrier, place, pred=is_new
    )
    tma.async_copy_global_to_shared(
        prefix, [prefix_row, channel], barrier, place, pred=is_new == 0
    )


@gluon.jit
def fill(tiles, rings, share, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Keep the rings full; one warp does this."""
    HALF: gl.constexpr = rings.q.shape[1]
    D: gl.constexpr = rings.q.shape[2]
    BLOCK: gl.constexpr = rings.k.shape[1]
    at = 0
    work = load_work(share, share.first, HEADS)
    for item in range(share.first, share.items, share.stride):
        following = load_work(share, item + share.stride, HEADS)
        turn = (item - share.first) // share.stride
        q_place = turn % 2
        q_ready = rings.q_ready.index(q_place)
        mbarrier.wait(rings.q_empty.index(q_place), ((turn // 2) & 1) ^ 1)
        mbarrier.expect(q_ready, 2 * HALF * D * 2)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                tiles.q,
                [work.first + half * HALF, work.head * D],
                q_ready,
                rings.q.index(q_place * 2 + half),
            )
        channel = work.head // GROUP * D
        masked = 1 + (work.partial > 0).to(gl.int32)
        new_from = masked + work.full
        new_row = work.first - work.before * BLOCK
        for step in range(0, new_from + work.before):
            is_new = (step == 0) | (step >= new_from)
            diagonal_or_new = gl.where(
                step == 0, work.first, new_row + (step - new_from) * BLOCK
            )
            partial_or_full = gl.where(step < masked, work.full, step - masked)
            old_row = work.prefix_row + partial_or_full * BLOCK
            fill_block(
                tiles.k_new,
                tiles.k_prefix,
                is_new,
                diagonal_or_new,
                old_row,
                channel,
                rings.k,
                rings.k_ready,
                rings.k_empty,
                at,
            )
            fill_block(
                tiles.v_new,
                tiles.v_prefix,
                is_new,
                diagonal_or_new,
                old_row,
                channel,
                rings.v,
                rings.v_ready,
                rings.v_empty,
                at,
            )
            at += 1
        work = following


@gluon.jit
def give_back(empty, at):
    """Mark place `at` as read by half of a tile."""
    mbarrier.arrive(empty.index(at % empty.shape[0]), count=1)


@gluon.jit
def new_rings(
    q_tiles,
    k_tiles,
    D: gl.constexpr,
    QUERIES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Create empty rings, with QUERIES queries in each half."""
    dtype: gl.constexpr = q_tiles.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    rings = Rings(
        q=gl.allocate_shared_memory(dtype, [4, QUERIES, D], q_tiles.layout),
        k=gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], k_tiles.layout),
        v=gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], k_tiles.layout),
        q_ready=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        q_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        k_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        k_empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        v_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        v_empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for place in gl.static_range(2):
        mbarrier.init(rings.q_ready.index(place), count=1)
        mbarrier.init(rings.q_empty.index(place), count=2)
    for place in gl.static_range(STAGES):
        mbarrier.init(rings.k_ready.index(place), count=1)
        mbarrier.init(rings.v_ready.index(place), count=1)
        mbarrier.init(rings.k_empty.index(place), count=2)
        mbarrier.init(rings.v_empty.index(place), count=2)
    fence_async_shared()
    return rings
