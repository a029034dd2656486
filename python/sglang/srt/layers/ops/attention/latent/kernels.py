"""Triton kernel of attention over latents: decode and extend, split over KV elements.

A tile has some query heads of one token, or all heads of a few tokens. A latent's
channels are loaded once: they are a part of the keys, and the values. Everything the
kernel needs arrives as an argument; grids depend on shapes, never on lengths.

    elements of a row   0 ..... prefix ..... prefix + new
    splits              |   0   |   1   |   2   |  equal counts of whole tiles
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls
# mypy: disable-error-code="index"

from typing import NamedTuple

import triton
import triton.language as tl

from sglang.srt.layers.ops.attention.shared.attend import (
    Sums,
    empty_sums,
    fold_masked_scores,
    is_not_finite,
)
from sglang.srt.layers.ops.attention.shared.elements import (
    find_table_row,
    find_tile,
    is_before,
    page_at,
    page_to_slots,
    query_heads,
    query_tokens,
)
from sglang.srt.layers.ops.attention.shared.masks import (
    ScoreMask,
    is_attended,
    load_row_lens,
)
from sglang.srt.layers.ops.stored_kv import read_value


class RowLatents(NamedTuple):
    """Latents as one row reads them from the pool.

    Fields:
        at: pointer to slot 0. slot_stride: distance between slots.
        table: pointer to the first page of the row.
        column_stride: distance between pages.
    """

    at: tl.tensor
    slot_stride: tl.tensor
    table: tl.tensor
    column_stride: tl.tensor


@triton.jit
def query_at(q, row, head, channel, WIDTH: tl.constexpr):
    """Return pointers to channels of queries: [queries, channels]."""
    return q.at + (row * q.stride + head * WIDTH)[:, None] + channel[None, :]


@triton.jit
def load_channels(at, is_read, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Load [elements, BLOCK] from pointers [elements, 1] to the first of COUNT
    channels. If `is_read` is None, all elements exist."""
    channel = tl.arange(0, BLOCK)[None, :]
    if is_read is None:
        if COUNT == BLOCK:
            return tl.load(at + channel)
        else:
            return tl.load(at + channel, mask=channel < COUNT, other=0.0)
    else:
        mask = is_read[:, None] & (channel < COUNT)
        return tl.load(at + channel, mask=mask, other=0.0)


@triton.jit
def attend_latents(
    sums,
    query,
    rotated,
    begin,
    stop,
    latents,
    mask,
    scale,
    LATENT: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HIDES: tl.constexpr,
):
    """Fold elements begin .. stop into the sums.

    Without IS_MASKED they are whole tiles and all are folded, else only elements that
    exist, and with HIDES only those of them that the mask allows.

    Masked latents that are not finite count as zero, because a zero weight would not
    silence them. A query that attends one becomes NaN.
    """
    BLOCK_N: tl.constexpr = TILE.masked_n if HIDES else TILE.block_n
    acc, top, total = sums
    for start in tl.range(begin, stop, BLOCK_N, num_stages=1 if HIDES else TILE.stages):
        element = start + tl.arange(0, BLOCK_N)
        is_read = None
        if IS_MASKED:
            is_read = element < stop
        page = tl.load(page_at(latents, element, LATENT.page_size), mask=is_read)
        slot = page_to_slots(page, element, LATENT.page_size)
        at = latents.at + slot * latents.slot_stride
        latent = load_channels(at, is_read, LATENT.rank, LATENT.block_rank)
        latent = read_value(latent, query.dtype)
        key = load_channels(at + LATENT.rank, is_read, LATENT.rope, LATENT.block_rope)
        key = read_value(key, query.dtype)
        score = tl.dot(query, tl.trans(latent), input_precision="ieee")
        score = tl.dot(rotated, tl.trans(key), score, input_precision="ieee") * scale
        if IS_MASKED:
            attends = is_read[None, :]
            if HIDES:
                attends = attends & is_attended(mask, element)
            score = tl.where(attends, score, float("-inf"))
        if HIDES:
            is_bad = is_not_finite(latent)
            is_bad_element = tl.max(is_bad.to(tl.int32), 1) > 0
            score = tl.where(attends & is_bad_element[None, :], float("nan"), score)
            latent = tl.where(is_bad, 0.0, latent.to(tl.float32)).to(latent.dtype)
        weight, shrink, top, total = fold_masked_scores(score, top, total)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(latent.dtype), latent, acc, input_precision="ieee")
    return Sums(acc, top, total)


@triton.jit
def tile_queries(
    lens,
    tree_mask,
    rows,
    tile,
    LATENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the queries of a tile number: (row, its first token, their elements, which
    of them exist, the row's prefix, its new tokens, end of the elements that one of
    them attends, end of the whole tiles that all attend, whether any exists)."""
    TOKENS: tl.constexpr = TILE.block_m // TILE.heads
    if lens.qo_indptr is None:
        row, first_token = tile, 0
        q_begin = row.to(tl.int64)
        prefix = tl.load(lens.prefix_lens + row).to(tl.int32) - 1
        new_tokens = prefix * 0 + 1
        is_any = row >= 0
    else:
        row, first_token = find_tile(lens.qo_indptr, rows, tile, TOKENS, BLOCK_R)
        is_any = row >= 0
        row = tl.maximum(row, 0)
        q_begin, new_tokens, prefix = load_row_lens(lens, row)
        is_any &= first_token < new_tokens
    own = prefix + query_tokens(first_token, TILE)
    is_token = is_before(own - prefix, new_tokens, TILE)
    if tree_mask is None:
        end = prefix + tl.minimum(new_tokens, first_token + TOKENS)
        full = prefix + first_token + 1
    else:
        end = prefix + new_tokens
        full = prefix
    full = full // TILE.block_n * TILE.block_n
    return row, q_begin, own, is_token, prefix, new_tokens, end, full, is_any


@triton.jit
def attend_split(
    query,
    rotated,
    begin,
    stop,
    full,
    latents,
    mask,
    scale,
    LATENT: tl.constexpr,
    TILE: tl.constexpr,
    HIDES: tl.constexpr,
):
    """Return `Sums` of elements begin .. stop, all of them attended up to `full`."""
    sums = empty_sums(TILE.block_m, LATENT.block_rank)
    full_stop = tl.maximum(tl.minimum(full, stop), begin)
    sums = attend_latents(
        sums,
        query,
        rotated,
        begin,
        full_stop,
        latents,
        mask,
        scale,
        LATENT,
        TILE,
        False,
        False,
    )
    return attend_latents(
        sums,
        query,
        rotated,
        full_stop,
        stop,
        latents,
        mask,
        scale,
        LATENT,
        TILE,
        True,
        HIDES,
    )


@triton.jit(do_not_specialize=["rows", "splits"])
def latent_kernel(
    q,
    out,
    cache,
    slot_stride,
    pages,
    lens,
    tree_mask,
    partials,
    rows,
    splits,
    scale,
    LATENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attention of one tile of queries over one split of its row's KV elements.

    Grid: (tiles x blocks of query heads, splits). A launch with one split writes `out`;
    others write `partials`, whose `lse` is -inf if a query attends nothing.

    Args:
        q, out: `args.Tokens`. pages: `args.Pages`.
        cache: [slots, rank + rope], `slot_stride` between slots.
        lens: `args.Lens`; without `qo_indptr` each row has one token, which
            `prefix_lens` counts.
        tree_mask: [rows, N, N] bytes, or None. With it, all rows have N new tokens.
        partials: `args.Partials`, of LATENT.rank channels.
        scale: factor on the products; exponents are powers of two.
        LATENT: `latent_attention.LatentShape`. TILE: `latent_attention.LatentTile`.
        BLOCK_R: rows that the search for a tile's row loads.
    """
    HEAD_BLOCKS: tl.constexpr = LATENT.q_heads // TILE.heads
    lane = tl.program_id(0) % HEAD_BLOCKS
    tile = tl.program_id(0) // HEAD_BLOCKS
    split = tl.program_id(1)
    row, q_begin, own, is_token, prefix, new_tokens, end, full, is_any = tile_queries(
        lens, tree_mask, rows, tile, LATENT, TILE, BLOCK_R
    )
    if not is_any:
        return
    mask = ScoreMask(
        row,
        q_begin,
        own,
        own,
        prefix * 0,
        end,
        prefix,
        new_tokens,
        None,
        tree_mask,
        None,
    )
    per_split = tl.cdiv(tl.cdiv(mask.end, TILE.block_n), splits) * TILE.block_n
    begin = split * per_split
    head = query_heads(lane, TILE)
    q_row = q_begin + mask.own - mask.prefix
    cell = (q_row * LATENT.q_heads + head) * splits + split
    if splits > 1:  # noqa: SIM102 - known when this is compiled
        if begin >= mask.end:
            tl.store(partials.lse + cell, float("-inf"), mask=is_token)
            return

    channel = tl.arange(0, LATENT.block_rank)
    turned = tl.arange(0, LATENT.block_rope)
    is_result = is_token[:, None] & (channel < LATENT.rank)[None, :]
    WIDTH: tl.constexpr = LATENT.rank + LATENT.rope
    q_at = query_at(q, q_row, head, channel, WIDTH)
    query = tl.load(q_at, mask=is_result, other=0.0)
    rotated = tl.load(
        query_at(q, q_row, head, LATENT.rank + turned, WIDTH),
        mask=is_token[:, None] & (turned < LATENT.rope)[None, :],
        other=0.0,
    )
    table = pages.table + find_table_row(pages, row) * pages.row_stride
    latents = RowLatents(cache, slot_stride, table, pages.column_stride)
    acc, top, total = attend_split(
        query,
        rotated,
        begin,
        tl.minimum(begin + per_split, mask.end),
        full,
        latents,
        mask,
        scale,
        LATENT,
        TILE,
        lens.qo_indptr is not None,
    )
    # A zero sum means that the query attends nothing, and `top` is -inf.
    total = tl.where(total == 0.0, 1.0, total)
    result = acc / total[:, None]
    if splits == 1:
        out_at = query_at(out, q_row, head, channel, LATENT.rank)
        tl.store(out_at, result.to(out.at.dtype.element_ty), mask=is_result)
    else:
        at = partials.results + cell[:, None] * LATENT.rank + channel[None, :]
        tl.store(at, result, mask=is_result)
        tl.store(partials.lse + cell, top + tl.log2(total), mask=is_token)
