"""Triton kernel of extend attention that reads new K and V from the model's output.

The cached prefix comes from the pool through the page table. The new tokens' rows are
consecutive, so the copy engine fetches them through tensor descriptors.

    elements of a row   0 ........ prefix ......................... prefix + new
                        | gathered | every token attends | diagonal |
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import triton
import triton.language as tl

from sglang.srt.layers.ops.attention.shared.attend import (
    Sums,
    attend_full,
    attend_masked,
    capped,
    empty_sums,
    fold_scores,
    store_average,
)
from sglang.srt.layers.ops.attention.shared.elements import (
    find_row,
    find_table_row,
    is_before,
    load_tile,
    page_at,
    page_to_slots,
    query_heads,
    query_tokens,
    row_kv,
    row_new_kv,
    token_pointers,
)
from sglang.srt.layers.ops.attention.shared.masks import ScoreMask
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def attend_rest(
    sums,
    query,
    begin,
    prefix,
    kv,
    scale,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold elements [begin, prefix) into the sums: at least one, fewer than a tile.

    The rest of the tile repeats the last element with no weight, so that the tile only
    reads what is attended anyway.
    """
    acc, top, total = sums
    number = begin + tl.arange(0, BLOCK_N)
    element = tl.minimum(number, prefix - 1)
    page = tl.load(page_at(kv, element, SHAPE.page_size))
    slot = page_to_slots(page, element, SHAPE.page_size)
    dtype = kv.k.dtype.element_ty
    k = load_tile(kv.k + slot * kv.k_stride, kv.is_channel, dtype, SHAPE)
    v = load_tile(kv.v + slot * kv.v_stride, kv.is_channel, dtype, SHAPE)
    score = capped(tl.dot(query, tl.trans(k), input_precision="ieee"), scale)
    score = tl.where((number < prefix)[None, :], score, float("-inf"))
    weight, shrink, top, total = fold_scores(score, top, total, scale)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return Sums(acc, top, total)


@triton.jit
def attend_prefix(
    sums, query, left, prefix, kv, scale, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """Fold elements [left, prefix), which every query attends, into the sums."""
    if prefix > left:
        rest = left + (prefix - left) // TILE.gather_n * TILE.gather_n
        sums = attend_full(
            sums,
            query,
            left,
            rest,
            kv,
            scale,
            SHAPE,
            TILE.gather_n,
            TILE.stages,
        )
        if rest < prefix:
            sums = attend_rest(
                sums, query, rest, prefix, kv, scale, SHAPE, TILE.gather_n
            )
    return sums


@triton.jit
def attend_new(
    sums,
    query,
    dense,
    first_token,
    q_begin,
    mask,
    k_tiles,
    v_tiles,
    first_channel,
    scale,
    TILE: tl.constexpr,
):
    """Fold the elements from `dense` on, which are new tokens, into the sums, in tiles
    of consecutive rows of the new K and V.

    Every query attends all of the full tiles. In the last ones it attends elements up
    to its own.
    """
    acc, top, total = sums
    unmasked = tl.maximum(mask.prefix + first_token + 1 - dense, 0) // TILE.block_n
    first_row = q_begin.to(tl.int32) - mask.prefix + dense
    tiles = tl.cdiv(tl.maximum(mask.end - dense, 0), TILE.block_n)
    for step in tl.range(0, tiles, num_stages=TILE.stages):
        row = first_row + step * TILE.block_n
        k = k_tiles.load([row, first_channel])
        score = capped(tl.dot(query, tl.trans(k), input_precision="ieee"), scale)
        if step >= unmasked:
            last = (mask.own - dense - step * TILE.block_n)[:, None]
            number = tl.arange(0, TILE.block_n)[None, :]
            score = tl.where(number <= last, score, float("-inf"))
        weight, shrink, top, total = fold_scores(score, top, total, scale)
        acc = acc * shrink[:, None]
        v = v_tiles.load([row, first_channel])
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return Sums(acc, top, total)


@triton.jit
def find_tokens(
    lens,
    rows,
    tile,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Return (row, its first token in the batch, first token of the tile within the
    row) of a tile number, which may lie past the row's tokens."""
    if ONE_ROW:
        # Known without a load, so the following loads don't wait for one another.
        row = tl.zeros([], tl.int32)
        q_begin = tl.zeros([], tl.int64)
        first_token = tile * TOKENS
    else:
        row = tl.maximum(find_row(lens.qo_indptr, rows, tile, TOKENS, BLOCK_R), 0)
        q_begin = tl.load(lens.qo_indptr + row)
        first_token = (tile - q_begin.to(tl.int32) // TOKENS - row) * TOKENS
    return row, q_begin, first_token


@triton.jit
def dense_bounds(prefix, first_token, last_token, window, TILE: tl.constexpr):
    """Return (lo, left, end). Some query of the tile attends lo .. end, and every query
    attends the prefix from `left` on."""
    lo = prefix * 0
    left = prefix * 0
    if window is not None:
        lo = tl.maximum(prefix + first_token - window + 1, 0)
        left = tl.maximum(prefix + last_token - window + 1, 0)
        left = tl.cdiv(left, TILE.gather_n) * TILE.gather_n
    return lo, left, prefix + last_token + 1


@triton.jit(do_not_specialize=["tokens", "rows", "tiles", "window"])
def extend_dense_kernel(
    q,
    out,
    pool,
    pages,
    lens,
    new_kv,
    k_tiles,
    v_tiles,
    tokens,
    rows,
    tiles,
    sinks,
    scale,
    window,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of one tile: TOKENS tokens of a row times `TILE.heads` query heads.

    Grid and order as in `extend_kernel`. Past the last new token a descriptor fetches
    rows of other requests, and past HEAD_DIM it fetches channels of another head. Their
    weights are zero, so they only show if they are NaN or infinite. A result with NaN
    is therefore computed again from attended elements alone.

    Args:
        q, out, pool, pages, lens, rows, tiles, sinks, scale, window, SHAPE, BLOCK_R: as
            in `extend_kernel`.
        new_kv: `args.NewKV`. k_tiles, v_tiles: descriptors of the same memory as
            [T, KV heads * head_dim], which fetch [TILE.block_n, SHAPE.block_d].
        tokens: T. TILE: `args.DenseTile`. ONE_ROW: rows is 1.
        PDL: the launch may start while the kernel before it runs.
    """
    TOKENS: tl.constexpr = TILE.block_m // TILE.heads
    HEAD_BLOCKS: tl.constexpr = SHAPE.group // TILE.heads
    LANES: tl.constexpr = SHAPE.kv_heads * HEAD_BLOCKS
    let_next_start(PDL)
    lane = tl.program_id(0) % LANES
    tile = tiles - 1 - tl.program_id(0) // LANES
    wait_for_inputs(PDL)
    row, q_begin, first_token = find_tokens(lens, rows, tile, TOKENS, BLOCK_R, ONE_ROW)
    q_end = tl.load(lens.qo_indptr + row + 1)
    prefix = tl.load(lens.prefix_lens + row).to(tl.int32)
    table_row = find_table_row(pages, row)
    token = query_tokens(first_token, TILE)
    kv_head = lane // HEAD_BLOCKS
    head = query_heads(lane, TILE)
    channel = tl.arange(0, SHAPE.block_d)
    is_channel = channel < SHAPE.head_dim
    q_row = q_begin + token
    # With one row, more than its tokens may be read: the launch pads them.
    is_readable = is_before(q_row, tokens if ONE_ROW else q_end, TILE)[:, None]
    q_at = token_pointers(q, q_row, head, channel, SHAPE.head_dim)
    query = tl.load(q_at, mask=is_readable & is_channel[None, :], other=0.0)
    new_tokens = (q_end - q_begin).to(tl.int32)
    if first_token >= new_tokens:
        return
    last_token = tl.minimum(first_token + TOKENS, new_tokens) - 1
    is_token = is_before(token, new_tokens, TILE)
    is_query = is_token[:, None] & is_channel[None, :]

    kv = row_kv(pool, pages, table_row, kv_head, channel, is_channel)
    first_channel = kv_head * SHAPE.head_dim
    new = row_new_kv(new_kv, q_begin, first_channel, channel)
    lo, left, end = dense_bounds(prefix, first_token, last_token, window, TILE)
    begin = lo // TILE.masked_n * TILE.masked_n
    own = prefix + token
    mask = ScoreMask(
        row, q_begin, own, own, lo, end, prefix, new_tokens, window, None, None
    )

    sums = empty_sums(TILE.block_m, SHAPE.block_d)
    if window is not None:
        stop = tl.minimum(left, end)
        sums = attend_masked(
            sums, query, begin, stop, kv, new, mask, scale, SHAPE, TILE
        )
    sums = attend_prefix(sums, query, left, prefix, kv, scale, SHAPE, TILE)
    sums = attend_new(
        sums,
        query,
        tl.maximum(left, prefix),
        first_token,
        q_begin,
        mask,
        k_tiles,
        v_tiles,
        first_channel,
        scale,
        TILE,
    )
    is_bad = is_query & (sums.acc != sums.acc)
    if tl.max(tl.max(is_bad.to(tl.int32), 1), 0) > 0:
        sums = empty_sums(TILE.block_m, SHAPE.block_d)
        sums = attend_masked(sums, query, begin, end, kv, new, mask, scale, SHAPE, TILE)
    out_at = token_pointers(out, q_row, head, channel, SHAPE.head_dim)
    store_average(out_at, sums, sinks, head, is_query)
