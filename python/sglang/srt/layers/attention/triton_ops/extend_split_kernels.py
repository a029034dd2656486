"""Triton kernels of extend attention of short rows: partial softmax, then combine.

Everything they know arrives as an argument; grids depend on shapes, never on lengths.

    elements of a row   0 ..... prefix ..... prefix + new
    splits              |   0   |   1   |   2   |  equal counts of whole tiles
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.extend_kernels import (
    _attend_full,
    _attend_full_late,
    _find_tile,
)


@triton.jit
def _is_attended(
    element,
    own,
    lo,
    end,
    tree_mask,
    prefix,
    new_tokens,
    window,
    HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
):
    """Whether the query at element `own` sees an element: [queries, elements]."""
    if HAS_TREE:
        branch = element - prefix
        mask_row = ((own - prefix) * new_tokens)[:, None]
        in_tree = tl.load(
            tree_mask + mask_row + branch[None, :],
            mask=((branch >= 0) & (element < end))[None, :] & (own < end)[:, None],
            other=0,
        )
        sees = (in_tree != 0) | (branch < 0)[None, :]
    else:
        sees = element[None, :] <= own[:, None]
        if HAS_WINDOW:
            sees &= element[None, :] > own[:, None] - window
    return sees & ((element >= lo) & (element < end))[None, :]


@triton.jit
def _masked_slots(
    table, table_column_stride, element, lo, end, is_channel, PAGE_SIZE: tl.constexpr
):
    """Slots of elements, [elements, 1], and which of their channels may be read."""
    is_read = (element >= lo) & (element < end)
    page = tl.load(
        table + (element // PAGE_SIZE).to(tl.int64) * table_column_stride,
        mask=is_read,
        other=0,
    )
    slot = (page + element % PAGE_SIZE).to(tl.int64)[:, None]
    return slot, is_read[:, None] & is_channel[None, :]


@triton.jit
def _is_bad(v):
    return ~(tl.abs(v.to(tl.float32)) < float("inf"))


@triton.jit
def _attend_masked(
    acc,
    top,
    total,
    bad,
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
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold the elements begin .. stop that the causal rule, the window or the tree
    allow into the sums; elements outside lo .. end are not read.

    V that is not finite counts as zero, and `bad` says that there was some: `_poison`
    sees to who attends it, apart from this loop, whose registers it would spill.
    """
    for start in tl.range(begin, stop, BLOCK_N, num_stages=1):
        element = start + tl.arange(0, BLOCK_N)
        slot, is_loaded = _masked_slots(
            table, table_column_stride, element, lo, end, is_channel, PAGE_SIZE
        )
        # All loads before the first use: their latencies overlap.
        k = tl.load(k_base + slot * k_slot_stride, mask=is_loaded, other=0.0)
        v = tl.load(v_base + slot * v_slot_stride, mask=is_loaded, other=0.0)
        sees = _is_attended(
            element,
            own,
            lo,
            end,
            tree_mask,
            prefix,
            new_tokens,
            window,
            HAS_WINDOW,
            HAS_TREE,
        )
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * score_scale
        score = tl.where(sees, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # A query without any element so far: -inf minus -inf would be NaN.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - anchor)
        weight = tl.exp2(score - anchor[:, None])
        top = new_top
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        is_bad = _is_bad(v)
        bad = tl.maximum(bad, tl.max(is_bad.to(tl.int32), 1))
        v = tl.where(is_bad, 0.0, v.to(tl.float32)).to(v.dtype)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total, bad


@triton.jit
def _poison(
    acc,
    own,
    lo,
    begin,
    stop,
    end,
    v_base,
    v_slot_stride,
    table,
    table_column_stride,
    tree_mask,
    prefix,
    new_tokens,
    window,
    is_channel,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """NaN for who attends, among the elements begin .. stop, V that is not finite.

    A weight of zero does not silence NaN: only who attends may see it.
    """
    for start in tl.range(begin, stop, BLOCK_N, num_stages=1):
        element = start + tl.arange(0, BLOCK_N)
        slot, is_loaded = _masked_slots(
            table, table_column_stride, element, lo, end, is_channel, PAGE_SIZE
        )
        v = tl.load(v_base + slot * v_slot_stride, mask=is_loaded, other=0.0)
        sees = _is_attended(
            element,
            own,
            lo,
            end,
            tree_mask,
            prefix,
            new_tokens,
            window,
            HAS_WINDOW,
            HAS_TREE,
        )
        touch = tl.dot(sees.to(v.dtype), _is_bad(v).to(v.dtype))
        acc = tl.where(touch > 0.0, float("nan"), acc)
    return acc


@triton.jit(do_not_specialize=["rows", "tree_tokens", "window"])
def extend_split_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    row_index,
    qo_indptr,
    prefix_lens,
    tree_mask,
    out,
    partial,
    lse,
    rows,
    tree_tokens,
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
    """Attention of one tile of queries over one split of its row's KV elements.

    Grid: (tiles x KV heads x blocks of a group's query heads, splits). The last split
    comes first: its masked part takes longest. `score_scale` is sm_scale * log2(e):
    exponents are powers of two, and so are those of `lse`. A launch of one split writes
    `out`, others `partial` and `lse`, which is -inf where a query attends nothing.
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS_PER_TILE
    HEAD_BLOCKS: tl.constexpr = GROUP // HEADS_PER_TILE
    LANES: tl.constexpr = KV_HEADS * HEAD_BLOCKS
    PAD_D: tl.constexpr = BLOCK_D != HEAD_DIM
    lane = tl.program_id(0) % LANES
    tile = tl.program_id(0) // LANES
    splits = tl.num_programs(1)
    split = splits - 1 - tl.program_id(1)
    if HAS_TREE:
        tiles_per_row = tl.cdiv(tree_tokens, TOKENS)
        row = tile // tiles_per_row
        first_token = (tile - row * tiles_per_row) * TOKENS
    else:
        row, first_token = _find_tile(qo_indptr, rows, tile, TOKENS, BLOCK_R)
        if row < 0:
            return
    q_begin = tl.load(qo_indptr + row)
    new_tokens = (tl.load(qo_indptr + row + 1) - q_begin).to(tl.int32)
    prefix = tl.load(prefix_lens + row).to(tl.int32)
    table_row = row.to(tl.int64)
    if HAS_ROW_INDEX:
        table_row = tl.load(row_index + row)
    if first_token >= new_tokens:
        return
    last_token = tl.minimum(first_token + TOKENS, new_tokens) - 1

    lo = prefix * 0
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
        left = tl.maximum(prefix + last_token - window + 1, 0)
        left = tl.minimum(tl.cdiv(left, BLOCK_N), tl.cdiv(end, BLOCK_N)) * BLOCK_N
        right = tl.maximum(left, right)
    first = lo // BLOCK_N * BLOCK_N
    per_split = tl.cdiv(tl.cdiv(end - first, BLOCK_N), splits) * BLOCK_N
    begin = first + split * per_split
    stop = begin + per_split

    member = tl.arange(0, BLOCK_M)
    token = first_token + member // HEADS_PER_TILE
    is_token = (token < new_tokens) & (member < TOKENS * HEADS_PER_TILE)
    kv_head = lane // HEAD_BLOCKS
    head = lane * HEADS_PER_TILE + member % HEADS_PER_TILE
    q_row = q_begin + token
    cell = (q_row * (KV_HEADS * GROUP) + head) * splits + split
    if begin >= end:
        # More splits than tiles; a launch of one split has no such program.
        tl.store(lse + cell, tl.full([BLOCK_M], float("-inf"), tl.float32), is_token)
        return

    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < HEAD_DIM
    is_query = is_token[:, None] & is_channel[None, :]
    query = tl.load(
        q + (q_row * q_row_stride + head * HEAD_DIM)[:, None] + channel[None, :],
        mask=is_query,
        other=0.0,
    )
    table = page_table + table_row * table_row_stride
    k_base = k_cache + kv_head.to(tl.int64) * k_head_stride + channel[None, :]
    v_base = v_cache + kv_head.to(tl.int64) * v_head_stride + channel[None, :]
    own = prefix + token

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    full_begin = tl.maximum(left, begin)
    full_stop = tl.maximum(tl.minimum(right, stop), full_begin)
    if IS_V_LATE:
        acc, top, total = _attend_full_late(
            acc,
            top,
            total,
            query,
            full_begin,
            full_stop,
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
            full_begin,
            full_stop,
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
    bad = tl.zeros([MASKED_N], tl.int32)
    left_stop = tl.minimum(left, stop)
    right_begin = tl.maximum(right, begin)
    right_stop = tl.minimum(stop, end)
    if HAS_WINDOW:
        acc, top, total, bad = _attend_masked(
            acc,
            top,
            total,
            bad,
            query,
            own,
            lo,
            begin,
            left_stop,
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
            PAGE_SIZE,
            HAS_WINDOW,
            HAS_TREE,
            MASKED_N,
        )
    acc, top, total, bad = _attend_masked(
        acc,
        top,
        total,
        bad,
        query,
        own,
        lo,
        right_begin,
        right_stop,
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
        PAGE_SIZE,
        HAS_WINDOW,
        HAS_TREE,
        MASKED_N,
    )
    if tl.max(bad, 0) > 0:
        if HAS_WINDOW:
            acc = _poison(
                acc,
                own,
                lo,
                begin,
                left_stop,
                end,
                v_base,
                v_slot_stride,
                table,
                table_column_stride,
                tree_mask,
                prefix,
                new_tokens,
                window,
                is_channel,
                PAGE_SIZE,
                HAS_WINDOW,
                HAS_TREE,
                MASKED_N,
            )
        acc = _poison(
            acc,
            own,
            lo,
            right_begin,
            right_stop,
            end,
            v_base,
            v_slot_stride,
            table,
            table_column_stride,
            tree_mask,
            prefix,
            new_tokens,
            window,
            is_channel,
            PAGE_SIZE,
            HAS_WINDOW,
            HAS_TREE,
            MASKED_N,
        )

    # A sum of zero: the query attends nothing, and `top` is -inf.
    total = tl.where(total == 0.0, 1.0, total)
    result = acc / total[:, None]
    if splits == 1:
        tl.store(
            out
            + (q_row * out_row_stride + head * HEAD_DIM)[:, None]
            + channel[None, :],
            result.to(out.dtype.element_ty),
            mask=is_query,
        )
    else:
        tl.store(
            partial + cell[:, None] * HEAD_DIM + channel[None, :],
            result,
            mask=is_query,
        )
        tl.store(lse + cell, top + tl.log2(total), mask=is_token)


@triton.jit(do_not_specialize=["rows", "splits"])
def extend_combine_kernel(
    partial,
    lse,
    qo_indptr,
    out,
    rows,
    splits,
    out_row_stride,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = average of a query's partial results, weighted by their softmax sums.

    Grid: blocks of BLOCK_P (token, query head) pairs. Partial results are loaded
    without waiting for `lse`, which says which of them count.
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    split = tl.arange(0, BLOCK_S)
    channel = tl.arange(0, BLOCK_D)
    is_pair = pair < tl.load(qo_indptr + rows) * Q_HEADS
    is_cell = is_pair[:, None] & (split < splits)[None, :]
    is_channel = channel < HEAD_DIM
    cell = pair[:, None] * splits + split[None, :]
    power = tl.load(lse + cell, mask=is_cell, other=float("-inf"))
    part = tl.load(
        partial + cell[:, :, None] * HEAD_DIM + channel[None, None, :],
        mask=is_cell[:, :, None] & is_channel[None, None, :],
        other=0.0,
    )
    top = tl.max(power, 1)
    # A query without any element: -inf minus -inf would be NaN.
    anchor = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(power - anchor[:, None])
    # Cells that no program wrote may hold anything, NaN too.
    part = tl.where((power == float("-inf"))[:, :, None], 0.0, part)
    total = tl.sum(weight, 1)
    result = tl.sum(part * weight[:, :, None], 1)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    token, head = pair // Q_HEADS, pair % Q_HEADS
    tl.store(
        out + (token * out_row_stride + head * HEAD_DIM)[:, None] + channel[None, :],
        result.to(out.dtype.element_ty),
        mask=is_pair[:, None] & is_channel[None, :],
    )
