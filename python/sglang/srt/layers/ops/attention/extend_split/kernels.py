"""Triton kernels of extend attention for short rows: partial softmax, then combine.

Everything they need arrives as an argument; grids depend on shapes, never on lengths.

    elements of a row   0 ..... prefix ..... prefix + new
    splits              |   0   |   1   |   2   |  equal counts of whole tiles
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import triton
import triton.language as tl

from sglang.srt.layers.ops.attention.shared.attend import (
    Sums,
    attend_masked_tiles,
    attend_unmasked,
    empty_sums,
    none_bad,
    poison,
    with_sink,
)
from sglang.srt.layers.ops.attention.shared.elements import (
    find_table_row,
    find_tile,
    is_before,
    query_heads,
    query_tokens,
    row_kv,
    token_pointers,
)
from sglang.srt.layers.ops.attention.shared.masks import (
    ScoreMask,
    attended_bounds,
    load_row_lens,
    query_positions,
)


@triton.jit
def attend_split(
    query,
    begin,
    stop,
    left,
    right,
    kv,
    mask,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return `Sums` of elements begin .. stop, all of them attended, left to right."""
    sums = empty_sums(TILE.block_m, SHAPE.block_d)
    full_begin = tl.maximum(left, begin)
    full_stop = tl.maximum(tl.minimum(right, stop), full_begin)
    sums = attend_unmasked(sums, query, full_begin, full_stop, kv, scale, SHAPE, TILE)
    bad = none_bad(TILE.masked_n)
    left_stop = tl.minimum(left, stop)
    right_begin = tl.maximum(right, begin)
    right_stop = tl.minimum(stop, mask.end)
    if mask.window is not None:
        sums, bad = attend_masked_tiles(
            sums,
            bad,
            query,
            begin,
            left_stop,
            kv,
            None,
            mask,
            scale,
            SHAPE,
            TILE,
            True,
        )
    sums, bad = attend_masked_tiles(
        sums,
        bad,
        query,
        right_begin,
        right_stop,
        kv,
        None,
        mask,
        scale,
        SHAPE,
        TILE,
        True,
    )
    acc, top, total = sums
    if tl.max(bad, 0) > 0:
        if mask.window is not None:
            acc = poison(
                acc, begin, left_stop, kv, mask, SHAPE.page_size, TILE.masked_n
            )
        acc = poison(
            acc, right_begin, right_stop, kv, mask, SHAPE.page_size, TILE.masked_n
        )
    return Sums(acc, top, total)


@triton.jit
def divisor(total, top, sinks, head, splits):
    """Return the softmax sums that a program divides by. With one split they include
    the sinks; otherwise the combine kernel adds those."""
    if sinks is not None:  # noqa: SIM102 - known when this is compiled
        if splits == 1:
            total = with_sink(total, top, tl.load(sinks + head))
    # A zero sum means that the query attends nothing, and `top` is -inf.
    return tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["rows", "tree_tokens", "window"])
def extend_split_kernel(
    q,
    out,
    pool,
    pages,
    lens,
    tree_mask,
    positions,
    partials,
    rows,
    tree_tokens,
    sinks,
    scale,
    window,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attention of one tile of queries over one split of its row's KV elements.

    Grid: (tiles x KV heads x blocks of a group's query heads, splits). The last split
    comes first, because its masked part takes longest. A launch with one split writes
    `out`; others write `partials`, whose `lse` is -inf if a query attends nothing.

    Args:
        q, out, pool, pages, lens, tree_mask, positions, rows, sinks, scale, window,
            SHAPE, TILE, BLOCK_R: as in `extend_kernel`.
        partials: `args.Partials`.
        tree_tokens: new tokens of each row if there is a tree mask.
    """
    TOKENS: tl.constexpr = TILE.block_m // TILE.heads
    HEAD_BLOCKS: tl.constexpr = SHAPE.group // TILE.heads
    LANES: tl.constexpr = SHAPE.kv_heads * HEAD_BLOCKS
    lane = tl.program_id(0) % LANES
    tile = tl.program_id(0) // LANES
    splits = tl.num_programs(1)
    split = splits - 1 - tl.program_id(1)
    if tree_mask is not None:
        tiles_per_row = tl.cdiv(tree_tokens, TOKENS)
        row = tile // tiles_per_row
        first_token = (tile - row * tiles_per_row) * TOKENS
    else:
        row, first_token = find_tile(lens.qo_indptr, rows, tile, TOKENS, BLOCK_R)
        if row < 0:
            return
    q_begin, new_tokens, prefix = load_row_lens(lens, row)
    table_row = find_table_row(pages, row)
    if first_token >= new_tokens:
        return
    last_token = tl.minimum(first_token + TOKENS, new_tokens) - 1
    token = query_tokens(first_token, TILE)
    is_token = is_before(token, new_tokens, TILE)
    own = prefix + token
    seen = query_positions(positions, q_begin, own, prefix, is_token)
    HAS_TREE: tl.constexpr = tree_mask is not None
    lo, left, right, end = attended_bounds(
        prefix, first_token, last_token, new_tokens, window, HAS_TREE, TILE.block_n
    )
    elements = (row, q_begin, own, seen, lo, end, prefix, new_tokens)
    mask = ScoreMask(*elements, window, tree_mask, positions)
    first = mask.lo // TILE.block_n * TILE.block_n
    per_split = tl.cdiv(tl.cdiv(mask.end - first, TILE.block_n), splits) * TILE.block_n
    begin = first + split * per_split

    head = query_heads(lane, TILE)
    q_row = q_begin + token
    cell = (q_row * (SHAPE.kv_heads * SHAPE.group) + head) * splits + split
    if begin >= mask.end:
        # More splits than tiles. A launch with one split has no such program.
        tl.store(partials.lse + cell, float("-inf"), mask=is_token)
        return

    channel = tl.arange(0, SHAPE.block_d)
    is_channel = channel < SHAPE.head_dim
    is_query = is_token[:, None] & is_channel[None, :]
    q_at = token_pointers(q, q_row, head, channel, SHAPE.head_dim)
    query = tl.load(q_at, mask=is_query, other=0.0)
    kv = row_kv(pool, pages, table_row, lane // HEAD_BLOCKS, channel, is_channel)
    acc, top, total = attend_split(
        query, begin, begin + per_split, left, right, kv, mask, scale, SHAPE, TILE
    )

    total = divisor(total, top, sinks, head, splits)
    result = acc / total[:, None]
    if splits == 1:
        out_at = token_pointers(out, q_row, head, channel, SHAPE.head_dim)
        tl.store(out_at, result.to(out.at.dtype.element_ty), mask=is_query)
    else:
        at = partials.results + cell[:, None] * SHAPE.head_dim + channel[None, :]
        tl.store(at, result, mask=is_query)
        tl.store(partials.lse + cell, top + tl.log2(total), mask=is_token)


@triton.jit(do_not_specialize=["rows", "splits"])
def extend_combine_kernel(
    partials,
    qo_indptr,
    sinks,
    out,
    rows,
    splits,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = average of a query's partial results, weighted by their softmax sums; a
    sink adds its weight to their sum.

    Grid: blocks of BLOCK_P (token, query head) pairs; without `qo_indptr` every row has
    one token. Partial results are loaded without waiting for their sums, which say
    which of them count.
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    split = tl.arange(0, BLOCK_S)
    channel = tl.arange(0, BLOCK_D)
    tokens = rows
    if qo_indptr is not None:
        tokens = tl.load(qo_indptr + rows)
    is_pair = pair < tokens * Q_HEADS
    is_cell = is_pair[:, None] & (split < splits)[None, :]
    is_channel = channel < HEAD_DIM
    cell = pair[:, None] * splits + split[None, :]
    power = tl.load(partials.lse + cell, mask=is_cell, other=float("-inf"))
    part = tl.load(
        partials.results + cell[:, :, None] * HEAD_DIM + channel[None, None, :],
        mask=is_cell[:, :, None] & is_channel[None, None, :],
        other=0.0,
    )
    top = tl.max(power, 1)
    # For a query without any element, -inf minus -inf would be NaN.
    anchor = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(power - anchor[:, None])
    # Cells that no program wrote may hold anything, including NaN.
    part = tl.where((power == float("-inf"))[:, :, None], 0.0, part)
    total = tl.sum(weight, 1)
    result = tl.sum(part * weight[:, :, None], 1)
    token, head = pair // Q_HEADS, pair % Q_HEADS
    if sinks is not None:
        total = with_sink(total, anchor, tl.load(sinks + head))
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        token_pointers(out, token, head, channel, HEAD_DIM),
        result.to(out.at.dtype.element_ty),
        mask=is_pair[:, None] & is_channel[None, :],
    )
