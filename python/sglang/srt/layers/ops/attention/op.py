"""Paged attention over a slot pool: one query per row (decode), or several (extend).

Knows slots, page tables and lengths; knows nothing of requests, layers or modes.

KV element i of row r lies in slot
`page_table[row_index[r], i // page_size] + i % page_size`: an entry of the table is the
first slot of its page. A row with no elements to attend yields zeros. The torch
references read the lengths on the host.

A sliding window W counts the query's own token, as transformers does: the query at
position p reads positions max(0, p - W + 1) .. p. Element e of a prefix, or of a row
without a tree mask, has position e. A tree node has the position of its depth. The
caller knows it anyway (`positions`), so layers need not derive it from the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang.srt.utils.dispatch import Op

_NATIVE = "sglang.srt.layers.ops.attention.native:"


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
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor,
) -> None:
    """out[r] = softmax(sm_scale * q[r] . K) V over KV elements 0 .. read_lens[r] - 1.

    Args:
        q: [R, Hq, D]; float32, bfloat16 or float16; Hq a multiple of Hkv, D a multiple
            of 8 up to 1024; heads and channels contiguous, any row stride.
        k_cache: [slots, Hkv, D], the dtype of q; channels contiguous.
        v_cache: [slots, Hkv, Dv], likewise. Dv is D, or less if `v_cache` is the first
            channels of `k_cache` (latents).
        page_table: [rows, columns] int32, any strides; first slots of pages.
        row_index: [R] int64, rows of `page_table`; None means row r.
        read_lens: [R] int64, elements that row r may read, its own token included.
        page_size: KV elements per table entry.
        sm_scale: factor on the scores.
        window: if positive, only the newest `window` elements are attended.
        logit_cap: if positive, a score s becomes cap * tanh(s / cap) (Gemma 2), after
            sm_scale and before any mask.
        sinks: [Hq], float32 or the dtype of q: a logit per query head that joins the
            denominator of the softmax and has no value (gpt-oss); neither scaled nor
            capped. Defaults to no sinks.
        out: [R, Hq, Dv], the dtype of q; heads and channels contiguous.
    """
    softmax = _Softmax(sm_scale, logit_cap, sinks)
    for row, end in enumerate(read_lens.tolist()):
        slots = _row_slots(page_table, row_index, row, page_size, end)
        if window > 0:
            slots = slots[-window:]
        allowed = torch.ones(1, len(slots), dtype=torch.bool, device=q.device)
        k, v = k_cache[slots], v_cache[slots]
        out[row] = _attend(q[row : row + 1], k, v, allowed, softmax)[0]


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
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    positions: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor,
) -> None:
    """Attend several new tokens per row. Their K and V are already in the pool.

    New token j of row r is KV element prefix_lens[r] + j and attends the elements up to
    and including itself; with a tree mask it attends the prefix and the new tokens i
    with tree_mask[r, j, i]. A token's result equals, bit by bit, the result of
    `decode_attention` for the same query and elements (natively; without a tree mask).

    Args:
        q: [T, Hq, D], as in `decode_attention`.
        k_cache, v_cache: as in `decode_attention`.
        page_table, row_index, page_size, sm_scale, logit_cap, sinks: as in
            `decode_attention`.
        qo_indptr: [R + 1] int64; row r has tokens qo_indptr[r] .. qo_indptr[r + 1].
            Tokens past qo_indptr[R] are left alone.
        prefix_lens: [R] int64, elements before a row's first new token.
        window: if positive, a token at position p attends nothing before position
            p - window + 1.
        tree_mask: [R, N, N] bool, contiguous; then every row has N new tokens.
        positions: [T] int64 of the new tokens, prefix_lens[r] + depth in a tree. Needed
            and read only if there are both a window and a tree mask.
        k_new, v_new: [T, Hkv, D or Dv] or None, copies of what the pool holds for the
            new tokens; any row stride, heads and channels contiguous. A kernel may read
            these instead of the pool.
        out: [T, Hq, Dv], as in `decode_attention`.

    Raises:
        ValueError: a window and a tree mask without positions.
    """
    positions = tree_positions(window, tree_mask, positions)
    softmax = _Softmax(sm_scale, logit_cap, sinks)
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
            if positions is not None:
                # New elements have the positions of their tokens.
                own = positions[begin:end, None]
                element = torch.cat((element[:prefix], own[:, 0]))
        else:
            allowed = element <= own
        if window > 0:
            allowed &= element > own - window
        out[begin:end] = _attend(q[begin:end], k, v, allowed, softmax)


extend_attention = Op(
    reference=extend_attention_ref, native=_NATIVE + "extend_attention"
)


def tree_positions(
    window: int, tree_mask: Tensor | None, positions: Tensor | None
) -> Tensor | None:
    """Return `positions` of `extend_attention` if they are read, else None.

    Raises:
        ValueError: they are needed and absent.
    """
    if window <= 0 or tree_mask is None:
        return None
    if positions is None:
        raise ValueError(
            f"extend_attention: window={window} with a tree mask needs the positions "
            "of the new tokens; pass positions"
        )
    return positions


class _Softmax(NamedTuple):
    """Arguments of `decode_attention` that shape its softmax."""

    sm_scale: float
    logit_cap: float
    sinks: Tensor | None

    def weights(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Weights of raw scores [n, Hkv, group, L]; allowed: [n, L] bool."""
        scores = scores * self.sm_scale
        if self.logit_cap > 0:
            scores = self.logit_cap * torch.tanh(scores / self.logit_cap)
        scores = scores.masked_fill(~allowed[:, None, None, :], float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.float().view(*scores.shape[1:3], 1)
            column = sinks.expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., : allowed.shape[1]]
        attends = allowed.any(dim=-1)[:, None, None, None]
        return weights.where(attends, 0.0)


def _row_slots(
    page_table: Tensor, row_index: Tensor | None, row: int, page_size: int, length: int
) -> Tensor:
    """Return the slots of the first `length` KV elements of a row: [length] int64."""
    table_row = row if row_index is None else int(row_index[row])
    element = torch.arange(length, device=page_table.device)
    return page_table[table_row, element // page_size].long() + element % page_size


def _attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, softmax: _Softmax
) -> Tensor:
    """Attend q [n, Hq, D] over k [L, Hkv, D] and v [L, Hkv, Dv]; allowed: [n, L] bool.
    Returns [n, Hq, Dv] float32."""
    k, v = k.float(), v.float()
    if q.shape[0] > 1 and not bool(torch.isfinite(v).all()):
        # A zero weight does not silence NaN, so each query sees only its own elements.
        return torch.cat(
            [
                _attend(q[j : j + 1], k[row], v[row], allowed[j : j + 1, row], softmax)
                for j, row in enumerate(allowed)
            ]
        )
    tokens, heads, dim = q.shape
    grouped = q.float().view(tokens, k.shape[1], heads // k.shape[1], dim)
    weights = softmax.weights(torch.einsum("nhgd,lhd->nhgl", grouped, k), allowed)
    values = torch.einsum("nhgl,lhd->nhgd", weights, v)
    return values.reshape(tokens, heads, v.shape[-1])
