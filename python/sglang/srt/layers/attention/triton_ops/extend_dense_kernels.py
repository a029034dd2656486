"""Triton kernel of extend attention that reads new K and V where the model left them.

The cached prefix comes from the pool through the page table; the new tokens, whose rows
are consecutive, through tensor descriptors, so that the copy engine fetches them.

    elements of a row   0 ........ prefix ......................... prefix + new
                        | gathered | every token attends | diagonal |
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.extend_kernels import (
    _attend_full,
    _attend_masked,
    _fold_scores,
    _load_tile,
)
from sglang.srt.layers.triton_ops.launch import let_next_start, wait_for_inputs


@triton.jit
def _find_row(qo_indptr, rows, tile, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The row of a tile number (see `_find_tile` of `extend_kernels`)."""
    count = tl.zeros([BLOCK_R], tl.int32)
    for chunk in range(0, rows, BLOCK_R):
        r = chunk + tl.arange(0, BLOCK_R)
        is_row = r < rows
        start = tl.load(qo_indptr + r, mask=is_row, other=0).to(tl.int32) // TOKENS + r
        count += (is_row & (start <= tile)).to(tl.int32)
    return tl.maximum(tl.sum(count, 0) - 1, 0)


@triton.jit
def _attend_rest(
    acc,
    top,
    total,
    query,
    begin,
    prefix,
    k_base,
    v_base,
    k_slot_stride,
    v_slot_stride,
    table,
    table_column_stride,
    score_scale,
    is_channel,
    PAGE_SIZE: tl.constexpr,
    PAD_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold the elements begin .. prefix, fewer than a tile but some, into the sums.

    Behind the last of them the tile repeats it, with no weight: what it reads is
    attended whatever it holds.
    """
    number = begin + tl.arange(0, BLOCK_N)
    element = tl.minimum(number, prefix - 1)
    page = tl.load(table + (element // PAGE_SIZE).to(tl.int64) * table_column_stride)
    slot = (page + element % PAGE_SIZE).to(tl.int64)[:, None]
    k = _load_tile(k_base, slot, k_slot_stride, is_channel, PAD_D)
    v = _load_tile(v_base, slot, v_slot_stride, is_channel, PAD_D)
    score = tl.dot(query, tl.trans(k), input_precision="ieee")
    score = tl.where((number < prefix)[None, :], score, float("-inf"))
    weight, shrink, top, total = _fold_scores(score, top, total, score_scale)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def _attend_rows(
    acc,
    top,
    total,
    query,
    own,
    element,
    first_row,
    tiles,
    unmasked_tiles,
    k_tiles,
    v_tiles,
    first_channel,
    score_scale,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fold tiles of consecutive rows of the new K and V into the sums; `element` is the
    number of the first row. Every query attends all of the first `unmasked_tiles`
    tiles, and in the others the elements up to its own.
    """
    for step in tl.range(0, tiles, num_stages=STAGES):
        row = first_row + step * BLOCK_N
        k = k_tiles.load([row, first_channel])
        score = tl.dot(query, tl.trans(k), input_precision="ieee")
        if step >= unmasked_tiles:
            last = (own - element - step * BLOCK_N)[:, None]
            number = tl.arange(0, BLOCK_N)[None, :]
            score = tl.where(number <= last, score, float("-inf"))
        weight, shrink, top, total = _fold_scores(score, top, total, score_scale)
        acc = acc * shrink[:, None]
        v = v_tiles.load([row, first_channel])
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit(do_not_specialize=["tokens", "rows", "tiles", "window"])
def extend_dense_kernel(
    q,
    k_cache,
    v_cache,
    k_new,
    v_new,
    k_tiles,
    v_tiles,
    page_table,
    row_index,
    qo_indptr,
    prefix_lens,
    out,
    tokens,
    rows,
    tiles,
    score_scale,
    window,
    q_row_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    k_new_stride,
    v_new_stride,
    table_row_stride,
    table_column_stride,
    out_row_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_ROW_INDEX: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATHER_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of one tile: TOKENS tokens of a row times HEADS_PER_TILE query heads.

    Grid and order as in `extend_kernel`. `k_new`, `v_new` and the descriptors
    `k_tiles`, `v_tiles` of [T, KV_HEADS * HEAD_DIM] show the same memory. A descriptor
    fetches rows of other requests behind the last new token, and channels of another
    head behind HEAD_DIM; their weights are zero, so that only NaN or infinity there
    could show. A result with NaN is therefore computed again, reading what is attended
    alone.
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS_PER_TILE
    HEAD_BLOCKS: tl.constexpr = GROUP // HEADS_PER_TILE
    LANES: tl.constexpr = KV_HEADS * HEAD_BLOCKS
    let_next_start(PDL)
    lane = tl.program_id(0) % LANES
    tile = tiles - 1 - tl.program_id(0) // LANES
    wait_for_inputs(PDL)
    if ONE_ROW:
        # Known without a load: the loads below do not wait for one another.
        row = 0
        q_begin = tl.zeros([], tl.int64)
        first_token = tile * TOKENS
        table_row = q_begin
    else:
        row = _find_row(qo_indptr, rows, tile, TOKENS, BLOCK_R)
        q_begin = tl.load(qo_indptr + row)
        first_token = (tile - q_begin.to(tl.int32) // TOKENS - row) * TOKENS
        table_row = row.to(tl.int64)
    q_end = tl.load(qo_indptr + row + 1)
    prefix = tl.load(prefix_lens + row).to(tl.int32)
    if HAS_ROW_INDEX:
        table_row = tl.load(row_index + row)
    member = tl.arange(0, BLOCK_M)
    token = first_token + member // HEADS_PER_TILE
    kv_head = lane // HEAD_BLOCKS
    head = lane * HEADS_PER_TILE + member % HEADS_PER_TILE
    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < HEAD_DIM
    q_row = q_begin + token
    # Of one row more may be read than its tokens: what the launch pads them with.
    readable = (q_row < (tokens if ONE_ROW else q_end)) & (
        member < TOKENS * HEADS_PER_TILE
    )
    query = tl.load(
        q + (q_row * q_row_stride + head * HEAD_DIM)[:, None] + channel[None, :],
        mask=readable[:, None] & is_channel[None, :],
        other=0.0,
    )
    new_tokens = (q_end - q_begin).to(tl.int32)
    if first_token >= new_tokens:
        return
    PAD_D: tl.constexpr = BLOCK_D != HEAD_DIM
    last_token = tl.minimum(first_token + TOKENS, new_tokens) - 1
    is_token = (token < new_tokens) & (member < TOKENS * HEADS_PER_TILE)
    is_query = is_token[:, None] & is_channel[None, :]

    table = page_table + table_row * table_row_stride
    k_base = k_cache + kv_head.to(tl.int64) * k_head_stride + channel[None, :]
    v_base = v_cache + kv_head.to(tl.int64) * v_head_stride + channel[None, :]
    first_channel = kv_head * HEAD_DIM
    k_new += q_begin * k_new_stride + first_channel + channel[None, :]
    v_new += q_begin * v_new_stride + first_channel + channel[None, :]

    own = prefix + token
    end = prefix + last_token + 1
    lo = prefix * 0
    begin = prefix * 0
    left = prefix * 0
    if HAS_WINDOW:
        # From `left` on every query of the tile is inside its window.
        lo = tl.maximum(prefix + first_token - window + 1, 0)
        begin = lo // MASKED_N * MASKED_N
        left = tl.maximum(prefix + last_token - window + 1, 0)
        left = tl.cdiv(left, GATHER_N) * GATHER_N
    dense = tl.maximum(left, prefix)
    unmasked_tiles = tl.maximum(prefix + first_token + 1 - dense, 0) // BLOCK_N
    first_row = q_begin.to(tl.int32) - prefix

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        acc, top, total = _attend_masked(
            acc,
            top,
            total,
            query,
            own,
            lo,
            begin,
            tl.minimum(left, end),
            end,
            k_base,
            v_base,
            k_slot_stride,
            v_slot_stride,
            table,
            table_column_stride,
            table,
            prefix,
            new_tokens,
            score_scale,
            window,
            is_channel,
            k_new,
            v_new,
            k_new_stride,
            v_new_stride,
            PAGE_SIZE,
            HAS_WINDOW,
            False,
            True,
            MASKED_N,
        )
    if prefix > left:
        rest = left + (prefix - left) // GATHER_N * GATHER_N
        acc, top, total = _attend_full(
            acc,
            top,
            total,
            query,
            left,
            rest,
            k_base,
            v_base,
            k_slot_stride,
            v_slot_stride,
            table,
            table_column_stride,
            score_scale,
            is_channel,
            PAGE_SIZE,
            PAD_D,
            GATHER_N,
            STAGES,
        )
        if rest < prefix:
            acc, top, total = _attend_rest(
                acc,
                top,
                total,
                query,
                rest,
                prefix,
                k_base,
                v_base,
                k_slot_stride,
                v_slot_stride,
                table,
                table_column_stride,
                score_scale,
                is_channel,
                PAGE_SIZE,
                PAD_D,
                GATHER_N,
            )
    acc, top, total = _attend_rows(
        acc,
        top,
        total,
        query,
        own,
        dense,
        first_row + dense,
        tl.cdiv(tl.maximum(end - dense, 0), BLOCK_N),
        unmasked_tiles,
        k_tiles,
        v_tiles,
        first_channel,
        score_scale,
        BLOCK_N,
        STAGES,
    )

    is_bad = is_query & (acc != acc)
    if tl.max(tl.max(is_bad.to(tl.int32), 1), 0) > 0:
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc, top, total = _attend_masked(
            acc,
            top,
            total,
            query,
            own,
            lo,
            begin,
            end,
            end,
            k_base,
            v_base,
            k_slot_stride,
            v_slot_stride,
            table,
            table_column_stride,
            table,
            prefix,
            new_tokens,
            score_scale,
            window,
            is_channel,
            k_new,
            v_new,
            k_new_stride,
            v_new_stride,
            PAGE_SIZE,
            HAS_WINDOW,
            False,
            True,
            MASKED_N,
        )

    # A sum of zero: the query attends nothing.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + (q_row * out_row_stride + head * HEAD_DIM)[:, None] + channel[None, :],
        result.to(out.dtype.element_ty),
        mask=is_query,
    )
