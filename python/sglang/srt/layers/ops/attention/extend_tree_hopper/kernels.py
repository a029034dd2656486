"""Gluon kernel of extend attention under tree masks on Hopper, over whole pages.

A program takes the new tokens of one request for two query heads that share a KV head,
one head for each of its two warpgroups. A third warp fetches K and V a block at a time,
a page or a part of one, so nothing has to be gathered. Programs are persistent. Masked
blocks come first, the last one before the others, so that the loop over the rest needs
no mask.

    elements of a request   0 .............. prefix ...... prefix + new
    blocks of 64            | full ... | full | masked ... | masked |
    order                     last ...    3       2            1
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
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang.srt.layers.ops.attention.extend_hopper.kernels import (
    attend_rest,
    clear_rest,
    sink_weight,
    start_scores,
    start_sums,
)
from sglang.srt.layers.ops.attention.extend_hopper.rings import give_back, new_rings
from sglang.srt.layers.ops.attention.shared.attend import Sums


class TreeTiles(NamedTuple):
    """Tensor descriptors: q and out as [T, heads * D], in tiles of the queries of a
    request; K and V of the pool as [slots, KV heads * D], in tiles of a block."""

    q: Any
    out: Any
    k: Any
    v: Any


class TreeShare(NamedTuple):
    """The work of a program (`first`, `first` + `stride`, ... below `items`) and the
    inputs it is cut from: `args.Pages`, int64 prefix_lens [R], tree_mask [R, NEW, NEW]
    of bytes."""

    first: Any
    items: Any
    stride: Any
    pages: Any
    prefix_lens: Any
    tree_mask: Any


class TreeWork(NamedTuple):
    """A request, the first of two query heads, its prefix and its blocks.

    Fields:
        table: pointer to the first page.
        full: blocks that every new token attends.
    """

    row: Any
    head: Any
    prefix: Any
    table: Any
    blocks: Any
    full: Any


@gluon.jit
def load_tree_work(
    share, item, HEADS: gl.constexpr, NEW: gl.constexpr, BLOCK: gl.constexpr
):
    """Return the work with number `item`. Heads of a request are neighbours and share K
    and V."""
    row = item * 2 // HEADS
    table_row = row.to(gl.int64)
    if share.pages.row_index is not None:
        table_row = gl.load(share.pages.row_index + row)
    prefix = gl.load(share.prefix_lens + row).to(gl.int32)
    return TreeWork(
        row=row,
        head=item * 2 % HEADS,
        prefix=prefix,
        table=share.pages.table + table_row * share.pages.row_stride,
        blocks=(prefix + NEW + BLOCK - 1) // BLOCK,
        full=prefix // BLOCK,
    )


@gluon.jit
def fetch(tensor, slot, channel, ring, ready, empty, at):
    """Fetch the block that begins at `slot` into place `at` of a ring."""
    STAGES: gl.constexpr = ring.shape[0]
    BYTES: gl.constexpr = ring.shape[1] * ring.shape[2] * 2
    barrier = ready.index(at % STAGES)
    mbarrier.wait(empty.index(at % STAGES), ((at // STAGES) & 1) ^ 1)
    mbarrier.expect(barrier, BYTES)
    tma.async_copy_global_to_shared(
        tensor, [slot, channel], barrier, ring.index(at % STAGES)
    )


@gluon.jit
def fill_from_pages(
    tiles,
    rings,
    share,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    NEW: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Keep the rings full; one warp does this."""
    M: gl.constexpr = rings.q.shape[1]
    D: gl.constexpr = rings.q.shape[2]
    BLOCK: gl.constexpr = rings.k.shape[1]
    at = 0
    for item in range(share.first, share.items, share.stride):
        work = load_tree_work(share, item, HEADS, NEW, BLOCK)
        turn = (item - share.first) // share.stride
        q_place = turn % 2
        q_ready = rings.q_ready.index(q_place)
        mbarrier.wait(rings.q_empty.index(q_place), ((turn // 2) & 1) ^ 1)
        mbarrier.expect(q_ready, 2 * M * D * 2)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                tiles.q,
                [work.row * NEW, (work.head + half) * D],
                q_ready,
                rings.q.index(q_place * 2 + half),
            )
        channel = work.head // GROUP * D
        for step in range(0, work.blocks):
            element = (work.blocks - 1 - step) * BLOCK
            page = (
                work.table + (element // PAGE).to(gl.int64) * share.pages.column_stride
            )
            slot = gl.load(page) + element % PAGE
            fetch(tiles.k, slot, channel, rings.k, rings.k_ready, rings.k_empty, at)
            fetch(tiles.v, slot, channel, rings.v, rings.v_ready, rings.v_empty, at)
            at += 1


@gluon.jit
def attended(share, work, query, element, NEW: gl.constexpr):
    """Return whether queries attend elements: [queries, elements]."""
    branch = gl.expand_dims(element - work.prefix, 0)
    query = gl.expand_dims(query, 1)
    tree = share.tree_mask + work.row.to(gl.int64) * (NEW * NEW)
    in_tree = gl.load(
        tree + query * NEW + branch,
        mask=(branch >= 0) & (branch < NEW) & (query < NEW),
        other=0,
    )
    return (in_tree != 0) | (branch < 0)


@gluon.jit
def fold_masked(score, top, total, factor):
    """`fold` of products some of which are -inf, that is, masked. So far a query may
    have attended nothing."""
    new_top = gl.maximum(top, gl.max(score, 1))
    # -inf minus -inf would be NaN.
    scaled = gl.where(new_top == float("-inf"), 0.0, new_top) * factor
    weight = gl.exp2(score * factor - gl.expand_dims(scaled, 1))
    shrink = gl.exp2(top * factor - scaled)
    return weight, shrink, new_top, total * shrink + gl.sum(weight, 1)


@gluon.jit
def put_head(tiles, place, result, row, head, out, out_stride, NEW: gl.constexpr):
    """Start copying a head's results out, or store the results of the tokens there
    are."""
    M: gl.constexpr = result.shape[0]
    D: gl.constexpr = result.shape[1]
    if NEW == M:
        place.store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(tiles.out, [row * NEW, head * D], place)
    else:
        LAYOUT: gl.constexpr = result.type.layout
        token = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
        channel = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
        at = (row * NEW + token).to(gl.int64) * out_stride + head * D
        cells = out + gl.expand_dims(at, 1) + gl.expand_dims(channel, 0)
        gl.store(cells, result, mask=gl.expand_dims(token < NEW, 1))


@gluon.jit
def attend_tree(
    tiles,
    rings,
    share,
    softmax,
    out,
    out_stride,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    NEW: gl.constexpr,
):
    """Attend one of the two heads of all this program's work: one warpgroup."""
    M: gl.constexpr = rings.q.shape[1]
    D: gl.constexpr = rings.q.shape[2]
    N: gl.constexpr = rings.k.shape[1]
    dtype: gl.constexpr = rings.q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    own = gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))
    column = gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
    at = 0
    for item in range(share.first, share.items, share.stride):
        work = load_tree_work(share, item, HEADS, NEW, N)
        turn = (item - share.first) // share.stride
        q_place = turn % 2
        query = rings.q.index(q_place * 2 + HALF)
        end = at + work.blocks
        last = (work.blocks - 1) * N
        is_seen = attended(share, work, own, last + column, NEW)
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([M], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([M, D], gl.float32, SUMS)
        mbarrier.wait(rings.q_ready.index(q_place), (turn // 2) & 1)

        score = warpgroup_mma_wait(0, deps=[start_scores(query, rings, at, SCORES)])
        give_back(rings.k_empty, at)
        if turn > 0:
            # The last work's results have left their place.
            tma.store_wait(0)
            mbarrier.arrive(rings.q_empty.index(1 - q_place), count=1)
        score = gl.where(is_seen, score, float("-inf"))
        weight, shrink, top, total = fold_masked(score, top, total, softmax.factor)
        p = gl.convert_layout(weight.to(dtype), WEIGHTS)
        if work.prefix + NEW < last + N:
            clear_rest(rings, at, work.prefix + NEW - last)
        at += 1
        if work.full < work.blocks - 1:
            is_seen = attended(share, work, own, last - N + column, NEW)
            acc = warpgroup_mma_wait(0, deps=[start_sums(p, acc, rings, at - 1)])
            give_back(rings.v_empty, at - 1)
            score = warpgroup_mma_wait(0, deps=[start_scores(query, rings, at, SCORES)])
            give_back(rings.k_empty, at)
            score = gl.where(is_seen, score, float("-inf"))
            weight, shrink, top, total = fold_masked(score, top, total, softmax.factor)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, ROW), 1)
            p = gl.convert_layout(weight.to(dtype), WEIGHTS)
            at += 1

        acc, top, total = attend_rest(
            query, rings, p, Sums(acc, top, total), at, end, softmax.factor, SCORES
        )
        at = end
        if softmax.sinks is not None:
            total += sink_weight(softmax, work.head + HALF, top)
        # A zero sum belongs to a padded query.
        inverse = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), ROW)
        result = (acc * gl.expand_dims(inverse, 1)).to(dtype)
        head = work.head + HALF
        put_head(tiles, query, result, work.row, head, out, out_stride, NEW)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items"])
def extend_tree_hopper_kernel(
    q_tiles,
    out_tiles,
    k_tiles,
    v_tiles,
    out,
    out_stride,
    pages,
    prefix_lens,
    tree_mask,
    softmax,
    items,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    NEW: gl.constexpr,
    PAGE: gl.constexpr,
    QUERIES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend NEW tokens of every request. Their K and V are in the pool.

    Grid: any number of programs. Program p takes work p, p + programs, and so on.

    Args:
        q_tiles, out_tiles, k_tiles, v_tiles: descriptors, as in `TreeTiles`.
        out, out_stride: the tensor of `out_tiles`, used if NEW is less than QUERIES.
        pages: `args.Pages`. prefix_lens, tree_mask: as in `TreeShare`.
        softmax: `Softmax`.
        items: requests * HEADS / 2.
        HEADS: query heads; GROUP of them share a KV head. D: channels.
        PAGE: slots of a page, a multiple of BLOCK.
        QUERIES: rows of a tile of q. BLOCK: elements, at least NEW.
        STAGES: blocks in a ring.
    """
    rings = new_rings(q_tiles, k_tiles, D, QUERIES, BLOCK, STAGES)
    gdc_launch_dependents()
    gdc_wait()
    tiles = TreeTiles(q_tiles, out_tiles, k_tiles, v_tiles)
    share = TreeShare(
        gl.program_id(0), items, gl.num_programs(0), pages, prefix_lens, tree_mask
    )
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                attend_tree,
                (tiles, rings, share, softmax, out, out_stride, upper, HEADS, NEW),
            ),
            (
                attend_tree,
                (tiles, rings, share, softmax, out, out_stride, lower, HEADS, NEW),
            ),
            (fill_from_pages, (tiles, rings, share, HEADS, GROUP, NEW, PAGE)),
        ],
        [4, 1],
        # Registers of a thread; the first warpgroup gets the remaining 240.
        [240, 24],
    )
