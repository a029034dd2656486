"""Triton kernel of extend attention over expanded latents: keys and values per head.

A head's key is its own channels, a product of the latent, and the rotated channels that
all heads share. Keys and values are consecutive, row after row of the batch, so the
copy engine can fetch them. A launch attends the new tokens or one block of the
prefixes; successive launches continue the same running results.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from sglang.srt.layers.ops.attention.extend_dense.kernels import find_tokens
from sglang.srt.layers.ops.attention.shared.attend import (
    Sums,
    empty_sums,
    fold_masked_scores,
    fold_scores,
    is_not_finite,
)
from sglang.srt.layers.ops.attention.shared.elements import token_pointers
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


class HeadKV(NamedTuple):
    """Keys and values of one row in one head.

    Fields:
        nope_tiles, rope_tiles, value_tiles: descriptors, as the kernel gets them.
        first: row of the descriptors that holds the row's first element.
        column: first channel of the head's keys; its values follow them.
    """

    nope_tiles: tl.tensor_descriptor
    rope_tiles: tl.tensor_descriptor
    value_tiles: tl.tensor_descriptor
    first: tl.tensor
    column: tl.tensor


@triton.jit
def key_products(query, rotated, kv, start, SHAPE: tl.constexpr):
    """Multiply the queries by the keys of the tile that begins at `start`."""
    k = kv.nope_tiles.load([kv.first + start, kv.column])
    product = tl.dot(query, tl.trans(k), input_precision="ieee")
    k = kv.rope_tiles.load([kv.first + start, SHAPE.rank])
    return tl.dot(rotated, tl.trans(k), product, input_precision="ieee")


@triton.jit
def load_values(kv, start, SHAPE: tl.constexpr):
    """Return the values of the tile that begins at `start`."""
    return kv.value_tiles.load([kv.first + start, kv.column + SHAPE.nope_dim])


@triton.jit
def attend_whole(
    sums, query, rotated, tiles, kv, scale, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """Fold the first `tiles` tiles, which every query attends, into the sums."""
    acc, top, total = sums
    for step in tl.range(0, tiles, num_stages=TILE.stages):
        start = step * TILE.block_n
        score = key_products(query, rotated, kv, start, SHAPE)
        weight, shrink, top, total = fold_scores(score, top, total, scale)
        acc = acc * shrink[:, None]
        v = load_values(kv, start, SHAPE)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return Sums(acc, top, total)


@triton.jit
def attend_whole_late(
    sums, query, rotated, tiles, kv, scale, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """`attend_whole` with the product with V one tile late, as `attend_full_late`."""
    acc, top, total = sums
    if tiles > 0:
        score = key_products(query, rotated, kv, 0, SHAPE)
        weight, shrink, top, total = fold_scores(score, top, total, scale)
        for step in tl.range(1, tiles, num_stages=TILE.stages):
            start = step * TILE.block_n
            score = key_products(query, rotated, kv, start, SHAPE)
            acc = acc * shrink[:, None]
            v = load_values(kv, start - TILE.block_n, SHAPE)
            acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
            weight, shrink, top, total = fold_scores(score, top, total, scale)
        acc = acc * shrink[:, None]
        v = load_values(kv, (tiles - 1) * TILE.block_n, SHAPE)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return Sums(acc, top, total)


@triton.jit
def attend_partly(
    sums,
    query,
    rotated,
    begin,
    last,
    end,
    kv,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold elements begin .. end into the sums; a query attends only up to its own
    `last`.

    A tile may hold rows of others and tokens that some query must not attend. Values
    that are not finite count as zero, because a zero weight would not silence them. A
    query that attends one becomes NaN.
    """
    acc, top, total = sums
    for start in tl.range(begin, end, TILE.block_n, num_stages=1):
        score = key_products(query, rotated, kv, start, SHAPE)
        number = start + tl.arange(0, TILE.block_n)
        attends = (number < end)[None, :] & (number[None, :] <= last[:, None])
        score = tl.where(attends, score * scale.factor, float("-inf"))
        v = load_values(kv, start, SHAPE)
        is_bad = is_not_finite(v)
        is_bad_element = tl.max(is_bad.to(tl.int32), 1) > 0
        score = tl.where(attends & is_bad_element[None, :], float("nan"), score)
        v = tl.where(is_bad, 0.0, v.to(tl.float32)).to(v.dtype)
        weight, shrink, top, total = fold_masked_scores(score, top, total)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return Sums(acc, top, total)


@triton.jit
def running_sums(running, cell, is_token, channel, SHAPE: tl.constexpr):
    """Return `Sums` of the earlier launches, from their results: [queries,
    channels]."""
    is_result = is_token[:, None] & (channel < SHAPE.value_dim)[None, :]
    at = running.results + cell[:, None] * SHAPE.value_dim + channel[None, :]
    acc = tl.load(at, mask=is_result, other=0.0)
    top = tl.load(running.lse + cell, mask=is_token, other=float("-inf"))
    return Sums(acc, top, tl.where(top == float("-inf"), 0.0, 1.0))


@triton.jit
def tile_elements(
    q_begin, first_token, new_tokens, row, indptr, CAUSAL: tl.constexpr, M: tl.constexpr
):
    """Return (first, whole, end): the row's first element among the keys, the end of
    the elements that every query of the tile attends, and of those that any attends."""
    if CAUSAL:
        first = q_begin.to(tl.int32)
        whole = first_token + 1
        end = tl.minimum(first_token + M, new_tokens)
    else:
        first = tl.load(indptr + row).to(tl.int32)
        end = tl.load(indptr + row + 1).to(tl.int32) - first
        whole = end
    return first, tl.minimum(whole, end), end


@triton.jit
def load_queries(q, q_row, head, is_token, CHANNELS: tl.constexpr, SHAPE: tl.constexpr):
    """Load (own channels, rotated channels) of the queries, each [queries,
    channels]."""
    channel = tl.arange(0, SHAPE.block_nope)
    query = tl.load(
        token_pointers(q, q_row, head, channel, CHANNELS),
        mask=is_token[:, None] & (channel < SHAPE.nope_dim)[None, :],
        other=0.0,
    )
    channel = tl.arange(0, SHAPE.block_rope)
    rotated = tl.load(
        token_pointers(q, q_row, head, SHAPE.nope_dim + channel, CHANNELS),
        mask=is_token[:, None] & (channel < SHAPE.rope_dim)[None, :],
        other=0.0,
    )
    return query, rotated


@triton.jit(do_not_specialize=["rows", "tiles"])
def latent_expanded_kernel(
    q,
    out,
    running,
    lens,
    indptr,
    nope_tiles,
    rope_tiles,
    value_tiles,
    rows,
    tiles,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_ROW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_PAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of one tile of a row's new tokens, in one head.

    Grid: (tiles x query heads). The last tokens of the rows come first, because they
        take
    longest.

    Args:
        q, out: `args.Tokens`, with a key's and a value's channels; `out` is written if
            CAUSAL.
        running: `args.Partials` without splits, the results of earlier launches. Read
            if HAS_PAST, written unless CAUSAL.
        lens: `args.Lens`; only the new tokens are read.
        indptr: int64 [rows + 1], each row's elements among the keys of a block of
            prefixes, which every new token attends. None if CAUSAL, when the keys
            belong to the new tokens.
        nope_tiles, value_tiles: descriptors of [elements, heads * (nope + value)], each
            head's keys, then its values. rope_tiles: of latents [elements, rank +
            rope]. Each fetches TILE.block_n rows.
        tiles: tiles of all rows. scale: `args.Scale` without a cap.
        SHAPE: `latent_expanded_table.ExpandedShape`. TILE:
            `ExpandedTile` of the same module.
        BLOCK_R, ONE_ROW, PDL: as in `extend_dense_kernel`.
    """
    let_next_start(PDL)
    head = tl.program_id(0) % SHAPE.q_heads
    tile = tiles - 1 - tl.program_id(0) // SHAPE.q_heads
    wait_for_inputs(PDL)
    row, q_begin, first_token = find_tokens(
        lens, rows, tile, TILE.block_m, BLOCK_R, ONE_ROW
    )
    new_tokens = (tl.load(lens.qo_indptr + row + 1) - q_begin).to(tl.int32)
    if first_token >= new_tokens:
        return
    first, whole, end = tile_elements(
        q_begin, first_token, new_tokens, row, indptr, CAUSAL, TILE.block_m
    )
    if HAS_PAST and not CAUSAL:  # noqa: SIM102 - known when this is compiled
        if end == 0:
            return
    token = first_token + tl.arange(0, TILE.block_m)
    is_token = token < new_tokens
    q_row = q_begin + token
    query, rotated = load_queries(
        q, q_row, head, is_token, SHAPE.nope_dim + SHAPE.rope_dim, SHAPE
    )
    cell = q_row * SHAPE.q_heads + head
    channel = tl.arange(0, SHAPE.block_value)
    if HAS_PAST:
        sums = running_sums(running, cell, is_token, channel, SHAPE)
    else:
        sums = empty_sums(TILE.block_m, SHAPE.block_value)
    column = head * (SHAPE.nope_dim + SHAPE.value_dim)
    kv = HeadKV(nope_tiles, rope_tiles, value_tiles, first, column)
    whole = whole // TILE.block_n
    if TILE.is_v_late:
        sums = attend_whole_late(sums, query, rotated, whole, kv, scale, SHAPE, TILE)
    else:
        sums = attend_whole(sums, query, rotated, whole, kv, scale, SHAPE, TILE)
    begin = whole * TILE.block_n
    last = token if CAUSAL else token * 0 + end
    sums = attend_partly(sums, query, rotated, begin, last, end, kv, scale, SHAPE, TILE)
    acc, top, total = sums
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    is_result = is_token[:, None] & (channel < SHAPE.value_dim)[None, :]
    if CAUSAL:
        out_at = token_pointers(out, q_row, head, channel, SHAPE.value_dim)
        tl.store(out_at, acc.to(out.at.dtype.element_ty), mask=is_result)
    else:
        at = running.results + cell[:, None] * SHAPE.value_dim + channel[None, :]
        tl.store(at, acc, mask=is_result)
        tl.store(running.lse + cell, top + tl.log2(total), mask=is_token)
