"""Triton kernel of extend attention: new tokens of many rows over their paged KV.

Everything it knows arrives as an argument; the grid depends on shapes, never on
lengths.

    elements of a row   0 ........ prefix ......... prefix + new
    tile of tokens      [lo | some | every token attends | some | end)
                            masked       full              masked
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _find_tile(qo_indptr, rows, tile, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """(row, first token of the tile within the row) of a tile number; row -1 if none.

    Row r owns the tile numbers from qo_indptr[r] // TOKENS + r on: at least as many as
    it needs, in the order of rows, without any sum over rows.
    """
    count = tl.zeros([BLOCK_R], tl.int32)
    for chunk in range(0, rows, BLOCK_R):
        r = chunk + tl.arange(0, BLOCK_R)
        is_row = r < rows
        start = tl.load(qo_indptr + r, mask=is_row, other=0).to(tl.int32) // TOKENS + r
        count += (is_row & (start <= tile)).to(tl.int32)
    row = tl.sum(count, 0) - 1
    start = tl.load(qo_indptr + tl.maximum(row, 0)).to(tl.int32) // TOKENS + row
    return row, (tile - start) * TOKENS


@triton.jit
def _page_slots(
    table,
    table_column_stride,
    start,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Slots of the elements start .. start + BLOCK_N, which all exist: [BLOCK_N, 1]."""
    element = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
    page = tl.load(table + (element // PAGE_SIZE).to(tl.int64) * table_column_stride)
    return (page + element % PAGE_SIZE).to(tl.int64)[:, None]


@triton.jit
def _load_tile(base, slot, stride, is_channel, PAD_D: tl.constexpr):
    if PAD_D:
        return tl.load(base + slot * stride, mask=is_channel[None, :], other=0.0)
    else:
        return tl.load(base + slot * stride)


@triton.jit
def _fold_scores(score, top, total, score_scale):
    """Online softmax of an unmasked tile: (weights, factor on the past, top, total)."""
    new_top = tl.maximum(top, tl.max(score, 1) * score_scale)
    shrink = tl.exp2(top - new_top)
    weight = tl.exp2(score * score_scale - new_top[:, None])
    total = total * shrink + tl.sum(weight, 1)
    return weight, shrink, new_top, total


@triton.jit
def _attend_full(
    acc,
    top,
    total,
    query,
    begin,
    stop,
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
    STAGES: tl.constexpr,
):
    """Fold the elements begin .. stop, which every query attends, into the sums.

    Loops over tiles count from a constant: the compiler does not pipeline the loads of
    one that begins at a value it does not know.
    """
    for step in tl.range(0, (stop - begin) // BLOCK_N, num_stages=STAGES):
        start = begin + step * BLOCK_N
        slot = _page_slots(table, table_column_stride, start, PAGE_SIZE, BLOCK_N)
        k = _load_tile(k_base, slot, k_slot_stride, is_channel, PAD_D)
        score = tl.dot(query, tl.trans(k), input_precision="ieee")
        weight, shrink, top, total = _fold_scores(score, top, total, score_scale)
        acc = acc * shrink[:, None]
        v = _load_tile(v_base, slot, v_slot_stride, is_channel, PAD_D)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def _attend_full_late(
    acc,
    top,
    total,
    query,
    begin,
    stop,
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
    STAGES: tl.constexpr,
):
    """`_attend_full` with the product with V one tile late.

    It overlaps the softmax of the next tile, at the price of registers. The weights
    stay float32 until then: the compiler waits at once for a product whose operand a
    loop carries in registers.
    """
    if begin < stop:
        slot = _page_slots(table, table_column_stride, begin, PAGE_SIZE, BLOCK_N)
        k = _load_tile(k_base, slot, k_slot_stride, is_channel, PAD_D)
        score = tl.dot(query, tl.trans(k), input_precision="ieee")
        weight, shrink, top, total = _fold_scores(score, top, total, score_scale)
        for step in tl.range(1, (stop - begin) // BLOCK_N, num_stages=STAGES):
            start = begin + step * BLOCK_N
            next_slot = _page_slots(
                table, table_column_stride, start, PAGE_SIZE, BLOCK_N
            )
            k = _load_tile(k_base, next_slot, k_slot_stride, is_channel, PAD_D)
            score = tl.dot(query, tl.trans(k), input_precision="ieee")
            acc = acc * shrink[:, None]
            v = _load_tile(v_base, slot, v_slot_stride, is_channel, PAD_D)
            acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
            weight, shrink, top, total = _fold_scores(score, top, total, score_scale)
            slot = next_slot
        acc = acc * shrink[:, None]
        v = _load_tile(v_base, slot, v_slot_stride, is_channel, PAD_D)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def _attend_masked(
    acc,
    top,
    total,
    query,
    own,
    lo,
    begin,
    stop,
    end,
    k_base,
    v_base,
    k_slot_stride,
    v_slot_stride,
    table,
    table_column_stride,
    tree_mask,
    prefix,
    new_tokens,
    score_scale,
    window,
    is_channel,
    k_new,
    v_new,
    k_new_stride,
    v_new_stride,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_NEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold the elements begin .. stop that the causal rule, the window or the tree
    allow into the sums; elements outside lo .. end are not read.

    With HAS_NEW the new tokens come from `k_new` and `v_new`, whose first row is the
    first new token of this row; without it, from the pool like the prefix.
    """
    for start in tl.range(begin, stop, BLOCK_N, num_stages=1):
        element = start + tl.arange(0, BLOCK_N)
        is_read = (element >= lo) & (element < end)
        page = tl.load(
            table + (element // PAGE_SIZE).to(tl.int64) * table_column_stride,
            mask=is_read & (element < prefix) if HAS_NEW else is_read,
            other=0,
        )
        slot = (page + element % PAGE_SIZE).to(tl.int64)[:, None]
        is_loaded = is_read[:, None] & is_channel[None, :]
        k_at = k_base + slot * k_slot_stride
        v_at = v_base + slot * v_slot_stride
        if HAS_NEW:
            is_old = (element < prefix)[:, None]
            new = (element - prefix).to(tl.int64)[:, None]
            k_at = tl.where(is_old, k_at, k_new + new * k_new_stride)
            v_at = tl.where(is_old, v_at, v_new + new * v_new_stride)
        k = tl.load(k_at, mask=is_loaded, other=0.0)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * score_scale

        if HAS_TREE:
            branch = element - prefix
            is_new = (branch >= 0) & (branch < new_tokens)
            mask_row = ((own - prefix) * new_tokens)[:, None]
            in_tree = tl.load(
                tree_mask + mask_row + branch[None, :],
                mask=is_new[None, :] & (own < end)[:, None],
                other=0,
            )
            is_attended = (in_tree != 0) | (branch < 0)[None, :]
        else:
            is_attended = element[None, :] <= own[:, None]
            if HAS_WINDOW:
                is_attended &= element[None, :] > own[:, None] - window
        is_attended &= is_read[None, :]
        score = tl.where(is_attended, score, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, 1))
        # A query without any element so far: -inf minus -inf would be NaN.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - anchor)
        weight = tl.exp2(score - anchor[:, None])
        top = new_top
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]

        v = tl.load(v_at, mask=is_loaded, other=0.0)
        is_bad = ~(tl.abs(v.to(tl.float32)) < float("inf"))
        if tl.max(tl.max(is_bad.to(tl.int32), 1), 0) > 0:
            # A weight of zero does not silence NaN: only who attends sees it.
            touch = tl.dot(is_attended.to(v.dtype), is_bad.to(v.dtype))
            acc = tl.where(touch > 0.0, float("nan"), acc)
            v = tl.where(is_bad, 0.0, v.to(tl.float32)).to(v.dtype)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit(do_not_specialize=["rows", "tiles", "window"])
def extend_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    row_index,
    qo_indptr,
    prefix_lens,
    tree_mask,
    out,
    rows,
    tiles,
    score_scale,
    window,
    q_row_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
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
    HAS_TREE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    IS_V_LATE: tl.constexpr,
):
    """Attention of one tile: TOKENS tokens of a row times HEADS_PER_TILE query heads.

    Grid: (tiles x KV heads x blocks of a group's query heads). Late tiles come first:
    under the causal rule they are the long ones, and short ones fill the gaps behind.
    `score_scale` is sm_scale * log2(e).
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS_PER_TILE
    HEAD_BLOCKS: tl.constexpr = GROUP // HEADS_PER_TILE
    PAD_D: tl.constexpr = BLOCK_D != HEAD_DIM
    lane = tl.program_id(0) % (KV_HEADS * HEAD_BLOCKS)
    tile = tiles - 1 - tl.program_id(0) // (KV_HEADS * HEAD_BLOCKS)
    row, first_token = _find_tile(qo_indptr, rows, tile, TOKENS, BLOCK_R)
    if row < 0:
        return
    q_begin = tl.load(qo_indptr + row)
    new_tokens = (tl.load(qo_indptr + row + 1) - q_begin).to(tl.int32)
    if first_token >= new_tokens:
        return
    prefix = tl.load(prefix_lens + row).to(tl.int32)
    last_token = tl.minimum(first_token + TOKENS, new_tokens) - 1

    member = tl.arange(0, BLOCK_M)
    token = first_token + member // HEADS_PER_TILE
    is_token = (token < new_tokens) & (member < TOKENS * HEADS_PER_TILE)
    kv_head = lane // HEAD_BLOCKS
    head = lane * HEADS_PER_TILE + member % HEADS_PER_TILE
    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < HEAD_DIM
    is_query = is_token[:, None] & is_channel[None, :]
    q_row = q_begin + token
    query = tl.load(
        q + (q_row * q_row_stride + head * HEAD_DIM)[:, None] + channel[None, :],
        mask=is_query,
        other=0.0,
    )

    table_row = row.to(tl.int64)
    if HAS_ROW_INDEX:
        table_row = tl.load(row_index + row)
    table = page_table + table_row * table_row_stride
    k_base = k_cache + kv_head.to(tl.int64) * k_head_stride + channel[None, :]
    v_base = v_cache + kv_head.to(tl.int64) * v_head_stride + channel[None, :]

    own = prefix + token
    lo = prefix * 0
    begin = prefix * 0
    left = prefix * 0
    if HAS_TREE:
        end = prefix + new_tokens
        right = prefix // BLOCK_N * BLOCK_N
        tree_mask += row.to(tl.int64) * new_tokens * new_tokens
    else:
        end = prefix + last_token + 1
        right = (prefix + first_token + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        lo = tl.maximum(prefix + first_token - window + 1, 0)
        begin = lo // MASKED_N * MASKED_N
        left = tl.maximum(prefix + last_token - window + 1, 0)
        left = tl.minimum(tl.cdiv(left, BLOCK_N), tl.cdiv(end, BLOCK_N)) * BLOCK_N
        right = tl.maximum(left, right)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if IS_V_LATE:
        acc, top, total = _attend_full_late(
            acc,
            top,
            total,
            query,
            left,
            right,
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
            BLOCK_N,
            STAGES,
        )
    else:
        acc, top, total = _attend_full(
            acc,
            top,
            total,
            query,
            left,
            right,
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
            BLOCK_N,
            STAGES,
        )
    if HAS_WINDOW:
        acc, top, total = _attend_masked(
            acc,
            top,
            total,
            query,
            own,
            lo,
            begin,
            left,
            end,
            k_base,
            v_base,
            k_slot_stride,
            v_slot_stride,
            table,
            table_column_stride,
            tree_mask,
            prefix,
            new_tokens,
            score_scale,
            window,
            is_channel,
            k_base,
            v_base,
            0,
            0,
            PAGE_SIZE,
            HAS_WINDOW,
            HAS_TREE,
            False,
            MASKED_N,
        )
    acc, top, total = _attend_masked(
        acc,
        top,
        total,
        query,
        own,
        lo,
        right,
        end,
        end,
        k_base,
        v_base,
        k_slot_stride,
        v_slot_stride,
        table,
        table_column_stride,
        tree_mask,
        prefix,
        new_tokens,
        score_scale,
        window,
        is_channel,
        k_base,
        v_base,
        0,
        0,
        PAGE_SIZE,
        HAS_WINDOW,
        HAS_TREE,
        False,
        MASKED_N,
    )

    # A sum of zero: the query attends nothing.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + (q_row * out_row_stride + head * HEAD_DIM)[:, None] + channel[None, :],
        result.to(out.dtype.element_ty),
        mask=is_query,
    )
