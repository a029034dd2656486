"""The op that zeroes the probabilities that top-k, top-p and min-p remove."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang.srt.sampling.ops import row_ops
from sglang.srt.utils.dispatch import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What is removed from R distributions.

    Fields:
        rows: [F] int64, the rows that top-k or top-p filters; None if there are none.
        top_ks: [R] int64 in [1, V]; V for rows without top-k.
        top_ps: [R] float32; 1 for rows without top-p.
        max_top_k: the largest top-k of `rows`; V if one of them only has top-p.
        min_ps: [R] float32; 0 for rows without min-p. None if there are none.
    """

    rows: Tensor | None
    top_ks: Tensor
    top_ps: Tensor
    max_top_k: int
    min_ps: Tensor | None

    @property
    def are_none(self) -> bool:
        """Whether nothing is removed."""
        return self.rows is None and self.min_ps is None

    def narrow(self, first: int, end: int) -> Filters:
        """Return those of the rows [first, end), for kernels, which find the rows to
        filter by themselves."""
        min_ps = self.min_ps
        return replace(
            self,
            top_ks=self.top_ks[first:end],
            top_ps=self.top_ps[first:end],
            min_ps=None if min_ps is None else min_ps[first:end],
        )

    def select(self, rows: Tensor) -> Filters:
        """Return those of `rows` [n] int64. Waits for the device."""
        min_ps, filtering = self.min_ps, self.rows
        if filtering is not None:
            filtering = torch.isin(rows, filtering).nonzero()[:, 0]
        return replace(
            self,
            rows=filtering if filtering is not None and len(filtering) else None,
            top_ks=self.top_ks[rows],
            top_ps=self.top_ps[rows],
            min_ps=None if min_ps is None else min_ps[rows],
        )


def keep_prefix_ref(probs: Tensor, filters: Filters) -> Tensor:
    """Return `probs` with 0 for ids that top-k, top-p or min-p removes, without waiting
    for the device. May overwrite `probs`.

    Each filter keeps a prefix of the ids sorted by falling probability (ties: lower id
    first): top-k the first k; top-p the shortest whose sum reaches p; min-p the ids
    with at least min_p times the best probability. Rows of NaN stay as they are.

    Args:
        probs: [R, V] float32, contiguous, each row a softmax.
    """
    rows, top_ks, top_ps = filters.rows, filters.top_ks, filters.top_ps
    max_top_k, min_ps = filters.max_top_k, filters.min_ps
    if rows is not None:
        if rows.numel() == probs.shape[0]:
            probs = _cut(probs, top_ks, top_ps, max_top_k)
        else:
            block = _cut(
                probs.index_select(0, rows), top_ks[rows], top_ps[rows], max_top_k
            )
            probs = probs.index_copy(0, rows, block)
    if min_ps is not None:
        # The best id survives top-k and top-p, so the floor is the original one.
        floor = probs.amax(dim=-1, keepdim=True) * min_ps[:, None]
        probs = row_ops.zero_below(probs, floor)
    return probs


def _cut(probs: Tensor, top_ks: Tensor, top_ps: Tensor, max_top_k: int) -> Tensor:
    """Return `probs` [F, V] with 0 for ids that top-k `top_ks` [F] or top-p `top_ps`
    [F] removes.

    Finds the value of the last kept id and how many of its ties stay. Then neither the
    order in which a sort leaves equal values nor the choice between sort and top-k
    matters, and nothing has to be scattered back.
    """
    # One value more than can be kept shows whether the value after the last kept one is
    # a tie.
    n_best = min(max_top_k + 1, probs.shape[1])
    negated = row_ops.negated_best(probs, n_best)
    sums = negated.double().neg_().cumsum(dim=-1)
    # Sums before the last id may already round to 1, and p = 1 must not cut there.
    limits = top_ps.double().masked_fill(top_ps >= 1.0, float("inf"))[:, None]
    n_kept = torch.searchsorted(sums, limits) + 1
    n_kept = torch.minimum(n_kept, top_ks[:, None]).clamp_(max=n_best)
    negated_last = negated.gather(1, n_kept - 1)
    last = -negated_last
    kept = row_ops.zero_below(probs, last)
    # Ties at the cut are rare, but looking for them costs a wait on an accelerator, so
    # it always cuts.
    n_tied = torch.searchsorted(negated, negated_last, right=True)
    if row_ops.on_host(probs) and not bool((n_tied > n_kept).any()):
        return kept
    n_above = torch.searchsorted(negated, negated_last)
    is_tie = probs == last
    surplus = is_tie & (is_tie.cumsum(dim=-1) > n_kept - n_above)
    return kept.masked_fill_(surplus, 0.0)


keep_prefix = Op(
    reference=keep_prefix_ref,
    triton="sglang.srt.sampling.ops.keep_prefix.triton:keep_prefix",
)
