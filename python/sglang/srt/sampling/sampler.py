"""Turns logits into token ids: edits, filters, one draw, logprobs.

A plain step samples through `Sampler`. Verification of draft trees uses `node_choices`
or `target_weights` on the tree's nodes and decides the rest itself. Everything runs on
the logits' device without waiting for it. Knows nothing of requests, schedulers or
grammars beyond the rows of `SamplingBatchInfo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.sampling.logprobs import LogprobRequest, LogprobResult, compute_logprobs
from sglang.srt.sampling.ops import row_ops
from sglang.srt.sampling.ops.choose_tokens.op import choose_tokens
from sglang.srt.sampling.ops.divide_rows.op import divide_rows
from sglang.srt.sampling.ops.draw.op import draw
from sglang.srt.sampling.ops.keep_prefix.op import Filters, keep_prefix
from sglang.srt.sampling.ops.softmax_rows.op import softmax_rows
from sglang.srt.sampling.penalties import (
    TokenHistory,
    apply_logit_bias,
    apply_penalties,
    ban_stop_tokens,
)
from sglang.srt.sampling.vocab_mask import apply_vocab_mask

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class Choice(NamedTuple):
    """Tokens that were chosen, and what from.

    Fields:
        token_ids: [R] int64 on the device.
        edited: [R, V], the logits of a tree's nodes after bias, penalties, bans and
            mask; None if all are greedy and there are none of these.
        kept: [R, V] float32, the probabilities that filters left; None without filters.
    """

    token_ids: torch.Tensor
    edited: torch.Tensor | None = None
    kept: torch.Tensor | None = None


class SamplerOutput(NamedTuple):
    """The sampled tokens.

    Fields:
        logprobs: if they were requested.
        is_drawn: whether the sampler chose the tokens; False if they are forced.
    """

    choice: Choice
    logprobs: LogprobResult | None
    is_drawn: bool = True

    @property
    def token_ids(self) -> torch.Tensor:
        """[R] int64 on the device."""
        return self.choice.token_ids

    def forced(self, token_ids: torch.Tensor) -> SamplerOutput:
        """Return other tokens than the sampler chose."""
        choice = self.choice._replace(token_ids=token_ids)
        return self._replace(choice=choice, is_drawn=False)


class Sampler:
    """The sampling step. Stateless; one instance serves every batch.

    NaN logits never raise: a greedy row then returns the first NaN's index, a sampled
    row some id in [0, V).
    """

    def forward(
        self,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        *,
        positions: torch.Tensor,
        history: TokenHistory | None = None,
        logprobs: LogprobRequest | None = None,
    ) -> SamplerOutput:
        """Sample one token per row.

        Args:
            logits: [R, V]; left unmodified.
            info: R rows.
            positions: [R] int64, index of the token to be sampled (= tokens known).
            history: tokens of each row; required if a row has a penalty.
            logprobs: the rows that want logprobs.

        Raises:
            ValueError: a row has a penalty and `history` is None.
        """
        if logprobs is not None:
            logits = logits.float()
        edited = edit_logits(logits, info, positions=positions, history=history)
        choice = select_tokens(edited, info, positions)
        if logprobs is None:
            return SamplerOutput(choice, None)
        scored = compute_logprobs(heat(edited, info), choice.token_ids, logprobs)
        return SamplerOutput(choice, scored)

    __call__ = forward


def process_logits(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    *,
    positions: torch.Tensor,
    history: TokenHistory | None = None,
) -> torch.Tensor:
    """Return the logits that tokens are drawn from, before top-k, top-p and min-p: as
    `edit_logits` does, then divided by the temperature.

    Returns `logits` itself if nothing applies, otherwise a new float32 tensor.
    """
    edited = edit_logits(logits, info, positions=positions, history=history)
    return heat(edited, info)


def heat(edited: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Return logits [R, V] divided by the temperature, 1 for greedy rows; float32
    unless all are greedy."""
    return edited if info.is_all_greedy else divide_rows(edited, info.temperatures)


def edit_logits(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    *,
    positions: torch.Tensor,
    history: TokenHistory | None = None,
) -> torch.Tensor:
    """Return the logits that tokens are chosen by, before the temperature.

    Applied in this order: logit bias, penalties, ban of stop ids below
    `min_new_tokens`, grammar mask. Returns `logits` itself if nothing applies,
    otherwise a new float32 tensor.
    """
    if info.is_plain_greedy:
        return logits
    edited = logits
    if info.edits_logits or info.vocab_mask is not None:
        edited = logits.to(torch.float32, copy=True)
    apply_logit_bias(edited, info)
    if info.has_penalty:
        if history is None:
            raise ValueError("rows with penalties need a TokenHistory, got None")
        apply_penalties(edited, info, history)
    return _restrict(edited, info, positions)


def _restrict(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
) -> torch.Tensor:
    """Ban stop ids of young rows and apply the grammar mask; may modify `logits`."""
    mask = info.vocab_mask
    if mask is None:
        ban_stop_tokens(logits, info, positions)
        return logits
    if not info.has_min_new_tokens:
        return apply_vocab_mask(logits, mask)
    # A complete grammar only allows EOS. If the minimum length bans that too, the
    # grammar wins, because a row without any allowed token could not be sampled.
    by_grammar = apply_vocab_mask(logits, mask)
    restricted = by_grammar.clone()
    ban_stop_tokens(restricted, info, positions)
    dead = restricted.amax(dim=-1, keepdim=True) == float("-inf")
    return torch.where(dead, by_grammar, restricted)


def select_tokens(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
) -> Choice:
    """Take the argmax of greedy rows; draw by inverse CDF with noise for the others.

    The CDF follows the order of the ids, whatever filters the batch has, so a row's
    token does not depend on the other rows.

    Args:
        logits: [R, V] from `edit_logits`, left unmodified; any float dtype.
        positions: [R] int64, which key the noise together with the rows' seeds.
    """
    if not info.filters_draws:
        return Choice(_choose_unfiltered(logits, info, positions))
    if info.is_all_greedy:
        return Choice(row_ops.argmax_rows(logits))
    drawn, kept = draw(
        softmax_rows(logits, info.temperatures),
        _filters(info),
        seeds=info.seeds,
        positions=positions,
    )
    if info.has_greedy:
        drawn = torch.where(info.greedy_rows, row_ops.argmax_rows(logits), drawn)
    return Choice(drawn, kept=kept)


def _choose_unfiltered(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
) -> torch.Tensor:
    """Do the work of `select_tokens` if nothing filters; one launch on CUDA."""
    if info.is_all_greedy:
        return choose_tokens(logits)
    return choose_tokens(
        heat(logits, info),
        seeds=info.seeds,
        positions=positions,
        greedy_rows=info.greedy_rows,
    )


def node_choices(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    *,
    nodes: int,
    positions: torch.Tensor,
    history: TokenHistory | None,
) -> Choice:
    """Choose the token after each node of b trees as a plain step would: with the noise
    of that position, which all nodes of one depth share.

    Args:
        logits: [b * nodes, V] in any float dtype; left unmodified.
        info: sampling state of the b requests; a mask, if any, has one row per node.
        positions: [b * nodes] int64, index of the token after each node.
        history: tokens on the path to each node; required if a request has a penalty.

    Returns:
        One token for each of the b * nodes rows.
    """
    if info.is_plain_greedy:
        return select_tokens(logits, info, positions)
    info = info.repeat_rows(nodes, keep_mask=True)
    edited = edit_logits(logits, info, positions=positions, history=history)
    choice = select_tokens(edited, info, positions)
    return choice._replace(edited=edited)


class NodeDraws:
    """Draws of the tokens after nodes of b trees, where filters apply, of some nodes at
    a time: only those that are reached cost anything.

    Draws are those of `node_choices`.

    Attributes:
        choice: of all b * nodes rows. Token ids are -1 until they are drawn, `kept` is
            undefined until then; those of greedy requests are there from the first.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        *,
        nodes: int,
        positions: torch.Tensor,
        history: TokenHistory | None,
    ) -> None:
        """Args: as for `node_choices`."""
        edited = logits
        if info.edits_logits or info.vocab_mask is not None:
            of_nodes = info.repeat_rows(nodes, keep_mask=True)
            edited = edit_logits(logits, of_nodes, positions=positions, history=history)
        token_ids = torch.full_like(positions, -1)
        if info.has_greedy:
            is_greedy = info.greedy_rows.repeat_interleave(nodes)
            token_ids = row_ops.argmax_rows(edited).where(is_greedy, -1)
        kept = torch.empty(edited.shape, dtype=torch.float32, device=edited.device)
        self.choice = Choice(token_ids, edited, kept)
        self._info = info
        self._filters = _filters(info)
        self._positions = positions

    def draw(self, rows: torch.Tensor) -> None:
        """Draw the token after the node rows[q] of each request q; none if that is
        negative."""
        token_ids, edited, kept = self.choice
        assert edited is not None and kept is not None
        softmax_rows(edited, self._info.temperatures, rows=rows, out=kept)
        draw(
            kept,
            self._filters,
            seeds=self._info.seeds,
            positions=self._positions,
            rows=rows,
            out=token_ids,
        )


def target_weights(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    *,
    nodes: int,
    positions: torch.Tensor,
    history: TokenHistory | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distribution of the token after each node of b trees.

    Args: as for `node_choices`.

    Returns:
        The edited logits [b * nodes, V], and float32 weights of the same shape that
        need not sum to 1; the nodes of a greedy request have one nonzero weight.
    """
    info = info.repeat_rows(nodes, keep_mask=True)
    edited = edit_logits(logits, info, positions=positions, history=history)
    weights = filtered_probs(heat(edited, info), info)
    if info.has_greedy:
        best = edited.argmax(dim=-1, keepdim=True)
        certain = torch.zeros_like(weights).scatter_(1, best, 1.0)
        weights = certain.where(info.greedy_rows[:, None], weights)
    return edited, weights


def filtered_probs(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Return [R, V] float32: softmax with 0 for ids that top-k, top-p or min-p removes.

    All three filters use the same distribution (`keep_prefix`). The kept probabilities
    are not rescaled. Greedy rows are not filtered.
    """
    return keep_prefix(torch.softmax(logits, dim=-1), _filters(info))


def _filters(info: SamplingBatchInfo) -> Filters:
    top_ks = info.top_ks
    if info.has_greedy:
        top_ks = top_ks.masked_fill(info.greedy_rows, info.vocab_size)
    return Filters(
        rows=info.filter_rows,
        top_ks=top_ks,
        top_ps=info.top_ps,
        max_top_k=info.max_top_k,
        min_ps=info.min_ps if info.needs_min_p else None,
    )
