"""Paged attention over a slot pool: one query per row (decode), or several (extend).

Knows slots, page tables and lengths; knows nothing of requests, layers or modes.

KV element i of row r lies in slot
`page_table[row_index[r], i // page_size] + i % page_size`: an entry of the table is the
first slot of its page. A row without any element to attend yields zeros. The torch
references read the lengths on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.utils.dispatch import Op

_NATIVE = "sglang.srt.layers.ops.native:"


def decode_attention_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    row_index: Tensor | None,
    read_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int = -1,
    out: Tensor,
) -> None:
    """out[r] = softmax(sm_scale * q[r] . K) V over KV elements 0 .. read_lens[r] - 1.

    Args:
        q: [R, Hq, D]; float32, bfloat16 or float16; Hq a multiple of Hkv, D a multiple
            of 8 up to 256; heads and channels contiguous, any row stride.
        k_cache, v_cache: [slots, Hkv, D], the dtype of q; channels contiguous.
        page_table: [rows, columns] int32, any strides; first slots of pages.
        row_index: [R] int64, rows of `page_table`; None means row r.
        read_lens: [R] int64, elements that row r may read, its own token included.
        page_size: KV elements per table entry.
        sm_scale: factor on the scores.
        window: when positive, only the newest `window` elements are attended.
        out: [R, Hq, D], the dtype of q; heads and channels contiguous.
    """
    for row, end in enumerate(read_lens.tolist()):
        slots = _row_slots(page_table, row_index, row, page_size, end)
        if window > 0:
            slots = slots[-window:]
        allowed = torch.ones(1, len(slots), dtype=torch.bool, device=q.device)
        k, v = k_cache[slots], v_cache[slots]
        out[row] = _attend(q[row : row + 1], k, v, allowed, sm_scale)[0]


decode_attention = Op(
    reference=decode_attention_ref, native=_NATIVE + "decode_attention"
)


def extend_attention_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    row_index: Tensor | None,
    qo_indptr: Tensor,
    prefix_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int = -1,
    tree_mask: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor,
) -> None:
    """Attention of several new tokens per row, whose K and V are in the pool already.

    New token j of row r is KV element prefix_lens[r] + j and attends the elements up to
    and including itself; with a tree mask it attends the prefix and the new tokens i
    with tree_mask[r, j, i]. A token's result equals, bit by bit, that of
    `decode_attention` for the same query and elements (natively; without a tree mask).

    Args:
        q: [T, Hq, D], as in `decode_attention`.
        k_cache, v_cache: [slots, Hkv, D], as in `decode_attention`.
        page_table, row_index, page_size, sm_scale: as in `decode_attention`.
        qo_indptr: [R + 1] int64; row r has tokens qo_indptr[r] .. qo_indptr[r + 1].
            Tokens past qo_indptr[R] are left alone.
        prefix_lens: [R] int64, elements before a row's first new token.
        window: when positive, only the newest `window` elements up to and including its
            own are attended.
        tree_mask: [R, N, N] bool, contiguous; then every row has N new tokens.
        k_new, v_new: [T, Hkv, D] or None, what the pool holds of the new tokens, any
            row stride; heads and channels contiguous. Read instead of the pool, or not.
        out: [T, Hq, D], as in `decode_attention`.

    Raises:
        ValueError: a window together with a tree mask.
    """
    if tree_mask is not None:
        refuse_window_with_tree(window)
    bounds = qo_indptr.tolist()
    for row, prefix in enumerate(prefix_lens.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        total = prefix + end - begin
        slots = _row_slots(page_table, row_index, row, page_size, total)
        k, v = k_cache[slots], v_cache[slots]
        if k_new is not None and v_new is not None:
            k[prefix:], v[prefix:] = k_new[begin:end], v_new[begin:end]
        element = torch.arange(total, device=q.device)
        own = element[prefix:, None]
        if tree_mask is not None:
            allowed = torch.ones(end - begin, total, dtype=torch.bool, device=q.device)
            allowed[:, prefix:] = tree_mask[row]
        else:
            allowed = element <= own
            if window > 0:
                allowed &= element > own - window
        out[begin:end] = _attend(q[begin:end], k, v, allowed, sm_scale)


extend_attention = Op(
    reference=extend_attention_ref, native=_NATIVE + "extend_attention"
)


def refuse_window_with_tree(window: int) -> None:
    """Raise ValueError if there is a window; to be asked where there is a tree mask."""
    if window > 0:
        raise ValueError(
            f"extend_attention: window={window} with a tree mask is not supported; "
            "pass window=-1 or no tree mask"
        )


def _row_slots(
    page_table: Tensor, row_index: Tensor | None, row: int, page_size: int, length: int
) -> Tensor:
    """Slots of the first `length` KV elements of a row: [length] int64."""
    table_row = row if row_index is None else int(row_index[row])
    element = torch.arange(length, device=page_table.device)
    return page_table[table_row, element // page_size].long() + element % page_size


def _attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, sm_scale: float
) -> Tensor:
    """q: [n, Hq, D]; k, v: [L, Hkv, D]; allowed: [n, L] bool. [n, Hq, D] float32."""
    k, v = k.float(), v.float()
    if q.shape[0] > 1 and not bool(torch.isfinite(v).all()):
        # A weight of zero does not silence NaN: each query sees its own elements only.
        return torch.cat(
            [
                _attend(q[j : j + 1], k[row], v[row], allowed[j : j + 1, row], sm_scale)
                for j, row in enumerate(allowed)
            ]
        )
    tokens, heads, dim = q.shape
    grouped = q.float().view(tokens, k.shape[1], heads // k.shape[1], dim)
    scores = torch.einsum("nhgd,lhd->nhgl", grouped, k) * sm_scale
    scores = scores.masked_fill(~allowed[:, None, None, :], float("-inf"))
    attends = allowed.any(dim=-1)[:, None, None, None]
    weights = scores.softmax(dim=-1).where(attends, 0.0)
    return torch.einsum("nhgl,lhd->nhgd", weights, v).reshape(tokens, heads, dim)
