"""Triton kernel of extend attention: new tokens of many rows over their paged KV.

Everything it needs arrives as an argument; the grid depends on shapes, never on
lengths.

    elements of a row   0 ........ prefix ......... prefix + new
    tile of tokens      [lo | some | every token attends | some | end)
                            masked       full              masked
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import triton
import triton.language as tl

from sglang.srt.layers.ops.attention.shared.attend import (
    attend_masked,
    attend_unmasked,
    empty_sums,
    store_average,
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


@triton.jit(do_not_specialize=["rows", "tiles", "window"])
def extend_kernel(
    q,
    out,
    pool,
    pages,
    lens,
    tree_mask,
    positions,
    rows,
    tiles,
    sinks,
    scale,
    window,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attention of one tile: TOKENS tokens of a row times `TILE.heads` query heads.

    Grid: (tiles x KV heads x blocks of a group's query heads). Late tiles come first.
    Under the causal rule they take longest, and short tiles fill the gaps after them.

    Args:
        q, out: `args.Tokens`. pool, pages, lens: types of the same names in `args`.
        tree_mask: [R, N, N] bytes, or None. With it, all rows have N new tokens.
        positions: int64 [T] if there is a tree mask and a window, else None.
        rows: R. tiles: tile numbers of the launch.
        sinks: [query heads] logits without a value, or None.
        scale: `args.Scale`.
        window: positions up to its own that a token attends, or None.
        SHAPE: `args.Shape`. BLOCK_R: rows that the search for a tile's row loads.
    """
    TOKENS: tl.constexpr = TILE.block_m // TILE.heads
    HEAD_BLOCKS: tl.constexpr = SHAPE.group // TILE.heads
    LANES: tl.constexpr = SHAPE.kv_heads * HEAD_BLOCKS
    lane = tl.program_id(0) % LANES
    tile = tiles - 1 - tl.program_id(0) // LANES
    row, first_token = find_tile(lens.qo_indptr, rows, tile, TOKENS, BLOCK_R)
    if row < 0:
        return
    q_begin, new_tokens, prefix = load_row_lens(lens, row)
    if first_token >= new_tokens:
        return
    last_token = tl.minimum(first_token + TOKENS, new_tokens) - 1

    token = query_tokens(first_token, TILE)
    is_token = is_before(token, new_tokens, TILE)
    head = query_heads(lane, TILE)
    channel = tl.arange(0, SHAPE.block_d)
    is_channel = channel < SHAPE.head_dim
    is_query = is_token[:, None] & is_channel[None, :]
    q_row = q_begin + token
    q_at = token_pointers(q, q_row, head, channel, SHAPE.head_dim)
    query = tl.load(q_at, mask=is_query, other=0.0)

    table_row = find_table_row(pages, row)
    kv = row_kv(pool, pages, table_row, lane // HEAD_BLOCKS, channel, is_channel)
    own = prefix + token
    seen = query_positions(positions, q_begin, own, prefix, is_token)
    HAS_TREE: tl.constexpr = tree_mask is not None
    lo, left, right, end = attended_bounds(
        prefix, first_token, last_token, new_tokens, window, HAS_TREE, TILE.block_n
    )
    elements = (row, q_begin, own, seen, lo, end, prefix, new_tokens)
    mask = ScoreMask(*elements, window, tree_mask, positions)

    sums = empty_sums(TILE.block_m, SHAPE.block_d)
    sums = attend_unmasked(sums, query, left, right, kv, scale, SHAPE, TILE)
    if window is not None:
        begin = mask.lo // TILE.masked_n * TILE.masked_n
        sums = attend_masked(
            sums, query, begin, left, kv, None, mask, scale, SHAPE, TILE
        )
    sums = attend_masked(
        sums, query, right, mask.end, kv, None, mask, scale, SHAPE, TILE
    )
    out_at = token_pointers(out, q_row, head, channel, SHAPE.head_dim)
    store_average(out_at, sums, sinks, head, is_query)
