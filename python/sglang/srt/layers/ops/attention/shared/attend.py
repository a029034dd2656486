"""Device functions of the attention kernels: fold KV elements into a softmax.

Exponents are powers of two. `scale` is `args.Scale`; `kv` and `mask` are `RowKV` and
`Mask`; `SHAPE` and `TILE` are the compile-time `Shape` and `Tile` of `args`. Triton
inlines these functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from sglang.srt.layers.ops.attention.shared.elements import load_tile, slots_of_tile
from sglang.srt.layers.ops.attention.shared.masks import is_attended, masked_at
from sglang.srt.layers.ops.stored_kv import read_value

LOG2_E = tl.constexpr(1.4426950408889634)


class Sums(NamedTuple):
    """Online softmax of a tile of queries.

    Fields:
        acc: [queries, channels] float32, V weighted by 2 ** (score - top).
        top: [queries] float32, largest score so far.
        total: [queries] float32, sum of the weights.
    """

    acc: tl.tensor
    top: tl.tensor
    total: tl.tensor


@triton.jit
def empty_sums(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    return Sums(
        acc=tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        top=tl.full([BLOCK_M], float("-inf"), tl.float32),
        total=tl.zeros([BLOCK_M], tl.float32),
    )


@triton.jit
def capped(product, scale):
    """Turn products of q and k into scores if there is a cap, else return them. Masks
    come later, because the cap would make minus infinity finite."""
    if scale.cap is not None:
        product = product * scale.factor
        # tanh |x| = (1 - e) / (1 + e) with e = exp(-2 |x|), which does not overflow.
        power = tl.exp2(tl.abs(product) * (-2.0 * LOG2_E))
        size = (1.0 - power) / (1.0 + power)
        product = tl.where(product < 0.0, -size, size) * scale.cap
    return product


@triton.jit
def fold_scores(score, top, total, scale):
    """Fold an unmasked tile of `capped` products: return (weights, factor on the past,
    top, total)."""
    if scale.cap is not None:
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
    else:
        new_top = tl.maximum(top, tl.max(score, 1) * scale.factor)
        weight = tl.exp2(score * scale.factor - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    return weight, shrink, new_top, total


@triton.jit
def to_scores(product, scale):
    """Turn products of q and k into scores."""
    score = capped(product, scale)
    if scale.cap is None:
        score = score * scale.factor
    return score


@triton.jit
def weights_of_read(query, k, is_read, top, scale):
    """Return (weights of a tile's elements, factor on earlier results, largest score)
    for queries that all attend whatever is read."""
    score = to_scores(tl.dot(query, tl.trans(k), input_precision="ieee"), scale)
    score = tl.where(is_read[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    shrink = tl.exp2(top - new_top)
    return tl.exp2(score - new_top[:, None]), shrink, new_top


@triton.jit
def with_sink(total, top, sink):
    """Add the weight of a sink, a logit without a value, to a softmax's sum. Zero stays
    zero: such a query attends nothing."""
    weight = tl.exp2(sink.to(tl.float32) * LOG2_E - top)
    return tl.where(total == 0.0, 0.0, total + weight)


@triton.jit
def fold_masked_scores(score, top, total):
    """`fold_scores` of scaled scores, where -inf marks masked ones."""
    new_top = tl.maximum(top, tl.max(score, 1))
    # For a query without any element so far, -inf minus -inf would be NaN.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - anchor)
    weight = tl.exp2(score - anchor[:, None])
    total = total * shrink + tl.sum(weight, 1)
    return weight, shrink, new_top, total


@triton.jit
def attend_full(
    sums,
    query,
    begin,
    stop,
    kv,
    scale,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fold elements begin .. stop, which every query attends, into the sums.

    The loop over tiles counts from a constant: if it began at a value unknown to the
    compiler, its loads would not be pipelined.
    """
    acc, top, total = sums
    for step in tl.range(0, (stop - begin) // BLOCK_N, num_stages=STAGES):
        start = begin + step * BLOCK_N
        slot = slots_of_tile(kv, start, SHAPE.page_size, BLOCK_N)
        k = load_tile(kv.k + slot * kv.k_stride, kv.is_channel, query.dtype, SHAPE)
        product = tl.dot(query, tl.trans(k), input_precision="ieee")
        score = capped(product, scale)
        weight, shrink, top, total = fold_scores(score, top, total, scale)
        acc = acc * shrink[:, None]
        v = load_tile(kv.v + slot * kv.v_stride, kv.is_channel, query.dtype, SHAPE)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return Sums(acc, top, total)


@triton.jit
def attend_full_late(
    sums,
    query,
    begin,
    stop,
    kv,
    scale,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like `attend_full`, with the product with V one tile late.

    It then overlaps the softmax of the next tile, at the price of registers. The
    weights stay float32 until then, because the compiler waits at once for a product if
    a loop carries one of its operands in registers.
    """
    acc, top, total = sums
    if begin < stop:
        slot = slots_of_tile(kv, begin, SHAPE.page_size, BLOCK_N)
        k = load_tile(kv.k + slot * kv.k_stride, kv.is_channel, query.dtype, SHAPE)
        product = tl.dot(query, tl.trans(k), input_precision="ieee")
        score = capped(product, scale)
        weight, shrink, top, total = fold_scores(score, top, total, scale)
        for step in tl.range(1, (stop - begin) // BLOCK_N, num_stages=STAGES):
            start = begin + step * BLOCK_N
            next_slot = slots_of_tile(kv, start, SHAPE.page_size, BLOCK_N)
            k = load_tile(
                kv.k + next_slot * kv.k_stride, kv.is_channel, query.dtype, SHAPE
            )
            product = tl.dot(query, tl.trans(k), input_precision="ieee")
            score = capped(product, scale)
            acc = acc * shrink[:, None]
            v = load_tile(kv.v + slot * kv.v_stride, kv.is_channel, query.dtype, SHAPE)
            acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
            weight, shrink, top, total = fold_scores(score, top, total, scale)
            slot = next_slot
        acc = acc * shrink[:, None]
        v = load_tile(kv.v + slot * kv.v_stride, kv.is_channel, query.dtype, SHAPE)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return Sums(acc, top, total)


@triton.jit
def attend_unmasked(
    sums, query, begin, stop, kv, scale, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """Fold elements begin .. stop, which every query attends, into the sums."""
    if TILE.is_v_late:
        return attend_full_late(
            sums, query, begin, stop, kv, scale, SHAPE, TILE.block_n, TILE.stages
        )
    else:
        return attend_full(
            sums, query, begin, stop, kv, scale, SHAPE, TILE.block_n, TILE.stages
        )


@triton.jit
def is_not_finite(v):
    return ~(tl.abs(v.to(tl.float32)) < float("inf"))


@triton.jit
def none_bad(BLOCK_N: tl.constexpr):
    """Return `bad` of `attend_masked_tiles` before the first tile."""
    return tl.zeros([BLOCK_N], tl.int32)


@triton.jit
def attend_masked_tiles(
    sums,
    bad,
    query,
    begin,
    stop,
    kv,
    new,
    mask,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    DEFER_NAN: tl.constexpr,
):
    """Fold the elements begin .. stop that the mask allows into the sums.

    V that is not finite counts as zero, because a zero weight would not silence it, and
    any query that attends it becomes NaN. That happens here or, with DEFER_NAN, in
    `poison`, outside this loop, whose registers it would spill; `bad` then says that
    there was some.

    Returns:
        The sums, and `bad`, [TILE.masked_n] int32.
    """
    acc, top, total = sums
    for start in tl.range(begin, stop, TILE.masked_n, num_stages=1):
        element = start + tl.arange(0, TILE.masked_n)
        k_at, v_at, is_loaded = masked_at(kv, new, mask, element, SHAPE.page_size)
        k = read_value(tl.load(k_at, mask=is_loaded, other=0.0), query.dtype)
        if DEFER_NAN:
            # All loads precede the first use, so that their latencies overlap.
            v = read_value(tl.load(v_at, mask=is_loaded, other=0.0), query.dtype)
        attends = is_attended(mask, element)
        product = tl.dot(query, tl.trans(k), input_precision="ieee")
        score = to_scores(product, scale)
        score = tl.where(attends, score, float("-inf"))
        weight, shrink, top, total = fold_masked_scores(score, top, total)
        acc = acc * shrink[:, None]
        if DEFER_NAN:
            is_bad = is_not_finite(v)
            bad = tl.maximum(bad, tl.max(is_bad.to(tl.int32), 1))
            v = tl.where(is_bad, 0.0, v.to(tl.float32)).to(v.dtype)
        else:
            v = read_value(tl.load(v_at, mask=is_loaded, other=0.0), query.dtype)
            is_bad = is_not_finite(v)
            if tl.max(tl.max(is_bad.to(tl.int32), 1), 0) > 0:
                touch = tl.dot(attends.to(v.dtype), is_bad.to(v.dtype))
                acc = tl.where(touch > 0.0, float("nan"), acc)
                v = tl.where(is_bad, 0.0, v.to(tl.float32)).to(v.dtype)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return Sums(acc, top, total), bad


@triton.jit
def attend_masked(
    sums,
    query,
    begin,
    stop,
    kv,
    new,
    mask,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """`attend_masked_tiles` that leaves nothing to `poison`."""
    bad = none_bad(TILE.masked_n)
    sums, bad = attend_masked_tiles(
        sums, bad, query, begin, stop, kv, new, mask, scale, SHAPE, TILE, False
    )
    return sums


@triton.jit
def store_average(at, sums, sinks, head, is_query):
    """Store the results of the queries of heads `head`: [queries, channels]."""
    total = sums.total
    if sinks is not None:
        total = with_sink(total, sums.top, tl.load(sinks + head))
    # A zero sum means that the query attends nothing.
    result = sums.acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(at, result.to(at.dtype.element_ty), mask=is_query)


@triton.jit
def poison(acc, begin, stop, kv, mask, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Make queries NaN that attend, among elements begin .. stop of the pool, V that is
    not finite."""
    for start in tl.range(begin, stop, BLOCK_N, num_stages=1):
        element = start + tl.arange(0, BLOCK_N)
        _, v_at, is_loaded = masked_at(kv, None, mask, element, PAGE_SIZE)
        v = tl.load(v_at, mask=is_loaded, other=0.0)
        attends = is_attended(mask, element)
        touch = tl.dot(attends.to(tl.float16), is_not_finite(v).to(tl.float16))
        acc = tl.where(touch > 0.0, float("nan"), acc)
    return acc
