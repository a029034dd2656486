"""Gluon kernel of causal extend attention on Hopper: copies and products overlap.

Programs are persistent: each takes tiles of 128 queries of one head, one after the
other. One warp keeps the copy engine busy. Two warpgroups of 64 queries each multiply;
while one computes exponentials, the other multiplies. A warpgroup starts the next
block's scores before it waits for the last block's products with V (FlashAttention-3,
arXiv:2407.08608).

    elements of a tile    0 ......... prefix ........... | new .......... own tile
    blocks of 128         | full ........ | partly full | full ....... | diagonal |
    order                   3 ...           2             4 ...          1

The two masked blocks come first, so that the loop over the others needs no mask. Copies
into shared memory go through two rings, one for K and one for V.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang.srt.layers.ops.attention.extend_hopper.rings import (
    Share,
    Tiles,
    fill,
    give_back,
    load_work,
    new_rings,
)
from sglang.srt.layers.ops.attention.shared.attend import Sums

_LOG2_E = gl.constexpr(1.4426950408889634)


class Softmax(NamedTuple):
    """Constants that turn products into weights: arguments of
    `extend_hopper_kernel`."""

    sinks: Any
    factor: Any


@gluon.jit
def start_scores(query, rings, at, SCORES: gl.constexpr):
    """Start the product of queries and the K at place `at`."""
    STAGES: gl.constexpr = rings.k.shape[0]
    M: gl.constexpr = query.shape[0]
    N: gl.constexpr = rings.k.shape[1]
    mbarrier.wait(rings.k_ready.index(at % STAGES), (at // STAGES) & 1)
    key = rings.k.index(at % STAGES).permute((1, 0))
    none = gl.zeros([M, N], gl.float32, SCORES)
    return warpgroup_mma(query, key, none, use_acc=False, is_async=True)


@gluon.jit
def start_sums(weight, acc, rings, at):
    """Start adding the product of weights and the V at place `at`."""
    STAGES: gl.constexpr = rings.v.shape[0]
    mbarrier.wait(rings.v_ready.index(at % STAGES), (at // STAGES) & 1)
    return warpgroup_mma(weight, rings.v.index(at % STAGES), acc, is_async=True)


@gluon.jit
def fold(score, top, total, factor):
    """Fold one more block into the softmax: return (weights, factor on earlier results,
    largest product, sum of weights)."""
    new_top = gl.maximum(top, gl.max(score, 1))
    scaled = new_top * factor
    weight = gl.exp2(score * factor - gl.expand_dims(scaled, 1))
    shrink = gl.exp2(top * factor - scaled)
    return weight, shrink, new_top, total * shrink + gl.sum(weight, 1)


@gluon.jit
def attend_rest(query, rings, p, sums, at, end, factor, SCORES: gl.constexpr):
    """Return `Sums` with the blocks at .. end, which every query attends, and with the
    V of the preceding block, whose weights are `p`."""
    acc, top, total = sums
    dtype: gl.constexpr = p.dtype
    WEIGHTS: gl.constexpr = p.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    for step in range(at, end):
        scores = start_scores(query, rings, step, SCORES)
        added = start_sums(p, acc, rings, step - 1)
        score = warpgroup_mma_wait(1, deps=[scores])
        give_back(rings.k_empty, step)
        weight, shrink, top, total = fold(score, top, total, factor)
        # The weights keep their registers until they are multiplied.
        acc, p = warpgroup_mma_wait(0, deps=[added, p])
        give_back(rings.v_empty, step - 1)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, ROW), 1)
        p = gl.convert_layout(weight.to(dtype), WEIGHTS)
    acc = warpgroup_mma_wait(0, deps=[start_sums(p, acc, rings, end - 1)])
    give_back(rings.v_empty, end - 1)
    return Sums(acc, top, total)


@gluon.jit
def sink_weight(softmax, head, top):
    """Return the weight of a head's sink, a logit without a value."""
    sink = gl.load(softmax.sinks + head).to(gl.float32) * _LOG2_E
    return gl.exp2(sink - top * softmax.factor)


@gluon.jit
def clear_rest(rings, at, tokens):
    """Zero the V after a request's last token. It belongs to another request or is
    undefined; its weight is zero, but it may be NaN. Both halves write the same."""
    BLOCK: gl.constexpr = rings.v.shape[1]
    D: gl.constexpr = rings.v.shape[2]
    STAGES: gl.constexpr = rings.v.shape[0]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    mbarrier.wait(rings.v_ready.index(at % STAGES), (at // STAGES) & 1)
    place = rings.v.index(at % STAGES)
    value = place.load(ROWS)
    number = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, ROWS))
    value = gl.where(gl.expand_dims(number, 1) < tokens, value, 0.0)
    place.store(value.to(rings.v.dtype))
    fence_async_shared()


@gluon.jit
def put_result(tiles, place, result, work, HALF: gl.constexpr, out, out_stride):
    """Start copying half a tile's results out, or store the results of its tokens."""
    M: gl.constexpr = result.shape[0]
    D: gl.constexpr = result.shape[1]
    if work.tokens >= HALF * M + M:
        place.store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(
            tiles.out, [work.first + HALF * M, work.head * D], place
        )
    else:
        LAYOUT: gl.constexpr = result.type.layout
        token = HALF * M + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
        channel = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
        row = (work.first + token).to(gl.int64) * out_stride + work.head * D
        cells = out + gl.expand_dims(row, 1) + gl.expand_dims(channel, 0)
        gl.store(cells, result, mask=gl.expand_dims(token < work.tokens, 1))


@gluon.jit
def attend(
    tiles,
    rings,
    share,
    softmax,
    out,
    out_stride,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Attend half of every tile of this program: the work of one warpgroup."""
    M: gl.constexpr = rings.q.shape[1]
    D: gl.constexpr = rings.q.shape[2]
    N: gl.constexpr = rings.k.shape[1]
    dtype: gl.constexpr = rings.q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    own = HALF * M + gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))
    column = gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
    at = 0
    work = load_work(share, share.first, HEADS)
    for item in range(share.first, share.items, share.stride):
        following = load_work(share, item + share.stride, HEADS)
        turn = (item - share.first) // share.stride
        q_place = turn % 2
        query = rings.q.index(q_place * 2 + HALF)
        has_partial = work.partial > 0
        end = at + 1 + has_partial.to(gl.int32) + work.full + work.before
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([M], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([M, D], gl.float32, SUMS)
        mbarrier.wait(rings.q_ready.index(q_place), (turn // 2) & 1)

        score = warpgroup_mma_wait(0, deps=[start_scores(query, rings, at, SCORES)])
        give_back(rings.k_empty, at)
        if turn > 0:
            # The last tile's results have left their place.
            tma.store_wait(0)
            mbarrier.arrive(rings.q_empty.index(1 - q_place), count=1)
        is_past = gl.expand_dims(column, 0) <= gl.expand_dims(own, 1)
        score = gl.where(is_past, score, float("-inf"))
        weight, shrink, top, total = fold(score, top, total, softmax.factor)
        p = gl.convert_layout(weight.to(dtype), WEIGHTS)
        if work.tokens < N:
            clear_rest(rings, at, work.tokens)
        at += 1
        if has_partial:
            acc = warpgroup_mma_wait(0, deps=[start_sums(p, acc, rings, at - 1)])
            give_back(rings.v_empty, at - 1)
            score = warpgroup_mma_wait(0, deps=[start_scores(query, rings, at, SCORES)])
            give_back(rings.k_empty, at)
            is_prefix = gl.expand_dims(column < work.partial, 0)
            score = gl.where(is_prefix, score, float("-inf"))
            weight, shrink, top, total = fold(score, top, total, softmax.factor)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, ROW), 1)
            p = gl.convert_layout(weight.to(dtype), WEIGHTS)
            at += 1

        acc, top, total = attend_rest(
            query, rings, p, Sums(acc, top, total), at, end, softmax.factor, SCORES
        )
        at = end
        if softmax.sinks is not None:
            total += sink_weight(softmax, work.head, top)
        inverse = gl.convert_layout(1.0 / total, ROW)
        result = (acc * gl.expand_dims(inverse, 1)).to(dtype)
        put_result(tiles, query, result, work, HALF, out, out_stride)
        work = following
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items"])
def extend_hopper_kernel(
    q_tiles,
    out_tiles,
    k_new,
    v_new,
    k_prefix,
    v_prefix,
    out,
    out_stride,
    plan,
    sinks,
    items,
    factor,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attention of the tiles of a plan.

    Grid: any number of programs. Program p takes work p, p + programs, and so on.

    Args:
        q_tiles, out_tiles, k_new, v_new, k_prefix, v_prefix: descriptors, as in
            `Tiles`.
        out, out_stride: the tensor of `out_tiles`, for tiles at the end of a request.
        plan: `ExtendPlan.tiles`. sinks: [HEADS] or None.
        items: tiles of the plan * HEADS.
        factor: factor from products of q and k to exponents of two.
        HEADS: query heads; GROUP of them share a KV head. D: channels.
        BLOCK: queries of a tile, and elements of a block. STAGES: blocks in a ring.
    """
    rings = new_rings(q_tiles, k_new, D, BLOCK // 2, BLOCK, STAGES)
    gdc_launch_dependents()
    gdc_wait()
    tiles = Tiles(q_tiles, out_tiles, k_new, v_new, k_prefix, v_prefix)
    share = Share(plan, gl.program_id(0), items, gl.num_programs(0))
    softmax = Softmax(sinks, factor)
    first_half: gl.constexpr = 0
    second_half: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                attend,
                (tiles, rings, share, softmax, out, out_stride, first_half, HEADS),
            ),
            (
                attend,
                (tiles, rings, share, softmax, out, out_stride, second_half, HEADS),
            ),
            (fill, (tiles, rings, share, HEADS, GROUP)),
        ],
        [4, 1],
        # Registers of a thread; the first warpgroup gets the remaining 240.
        [240, 24],
    )
