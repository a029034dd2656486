"""Sizes and choices of speculation: the width of the draft's input, the tokens it
proposes, and the proposals that the target accepts.

Everything runs on the device without waiting for it; shapes depend on the batch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.configs.draft_config import hidden_source_size, num_hidden_sources
from sglang.srt.draft_trees.buffers import DraftCandidates, DraftTree, VerifyResult
from sglang.srt.draft_trees.ops.tree.op import top_k_probs
from sglang.srt.draft_trees.ops.verify.op import (
    verify_tree_greedy,
    verify_tree_target_only,
    walk_tree,
)
from sglang.srt.sampling.logprobs import LogprobRequest, LogprobResult, compute_logprobs
from sglang.srt.sampling.ops import row_ops
from sglang.srt.sampling.ops.divide_rows.op import divide_rows
from sglang.srt.sampling.ops.softmax_rows.op import splits_vocab
from sglang.srt.sampling.penalties import TokenHistory
from sglang.srt.sampling.sampler import (
    Choice,
    NodeDraws,
    node_choices,
    target_weights,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

EAGLE3 = "EAGLE3"
STANDALONE = "STANDALONE"
_ROWS_AT_ONCE = 64
"""Drawing after so many nodes takes about as long as drawing after a few."""
_NODES_OF_TREES = 8
"""Smaller trees are drawn from at once, however many there are, so that every kernel is
compiled by a warm-up with nine requests."""


def get_draft_hidden_dim(model_runner: ModelRunner) -> int | None:
    """Return the width of the target's hidden states that a draft worker's extends
    read.

    Worker, buffers and graphs all take it from here.

    Args:
        model_runner: the draft worker's runner.

    Returns:
        None if the draft is a separate language model.
    """
    config = model_runner.model_config
    if model_runner.spec_algorithm == STANDALONE:
        return None
    if model_runner.spec_algorithm != EAGLE3:
        return config.hidden_size
    return num_hidden_sources(config) * hidden_source_size(config)


def propose(logits: Tensor, topk: int) -> DraftCandidates:
    """Return the `topk` best next tokens of each row of the draft's logits [R, V']."""
    found = DraftCandidates.allocate(len(logits), topk, device=logits.device)
    top_k_probs(logits, probs=found.probs, ids=found.ids)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptThresholds:
    """`--speculative-accept-threshold-single` and `-acc`. At 1 they keep the target's
    distribution exactly."""

    single: float
    acc: float

    @property
    def are_exact(self) -> bool:
        return self.single >= 1.0 and self.acc >= 1.0


class Decision(NamedTuple):
    """What a verification decided by.

    Fields:
        logits: [b * D, V], edited as the requests ask, before the temperature.
        choices: [b, D], of the target, or None if lowered thresholds also accept
            others.
        made: how the choices were made; None likewise.
    """

    logits: Tensor
    choices: Tensor | None
    made: Choice | None


def accept_drafts(
    tree: DraftTree,
    logits: Tensor,
    info: SamplingBatchInfo,
    *,
    history: TokenHistory | None,
    thresholds: AcceptThresholds,
    result: VerifyResult,
    agree: Callable[[Tensor], Tensor] = lambda choices: choices,
) -> Decision:
    """Decide which nodes of b trees are accepted, and the token after the last of them.

    After each node the target chooses a token, by argmax or by a draw with the noise of
    that position, and the child that proposes it is accepted. So a child is accepted
    with its probability under the target's distribution, and the output equals plain
    decoding with the same seeds, whatever the drafts. Lowered thresholds accept more.

    Args:
        logits: [b * D, V], the target's logits after each node.
        info: sampling state of the b requests; its mask, if any, has one row per node.
        history: tokens on the path to each node, if a row has a penalty.
        result: b rows, written.
        agree: makes drawn choices [b, D] the same on every rank, in place.
    """
    nodes = tree.tokens.shape[1]
    positions = tree.positions.view(-1) + 1
    if info.is_all_greedy or thresholds.are_exact:
        choose = node_choices
        if _draws_along_paths(logits, info, nodes=nodes):
            choose = partial(_choose_along_paths, tree, result=result)
        made = choose(logits, info, nodes=nodes, positions=positions, history=history)
        choices = made.token_ids.view(-1, nodes)
        if not info.is_all_greedy:
            choices = agree(choices.contiguous())
        verify_tree_greedy(tree, choices, result=result)
        return Decision(logits if made.edited is None else made.edited, choices, made)
    edited, weights = target_weights(
        logits, info, nodes=nodes, positions=positions, history=history
    )
    verify_tree_target_only(
        tree,
        weights,
        weights.sum(dim=-1),
        keys=info.seeds,
        threshold_single=thresholds.single,
        threshold_acc=thresholds.acc,
        result=result,
    )
    for tensor in (result.predict, result.accept_index, result.accept_lens):
        agree(tensor)
    return Decision(edited, None, None)


def _draws_along_paths(logits: Tensor, info: SamplingBatchInfo, *, nodes: int) -> bool:
    """Whether to draw node by node along the accepted paths, instead of after all nodes
    at once."""
    return (
        info.filters_draws
        and len(logits) > _ROWS_AT_ONCE
        and nodes >= _NODES_OF_TREES
        and (row_ops.on_host(logits) or splits_vocab(logits.shape[1]))
    )


def _choose_along_paths(
    tree: DraftTree,
    logits: Tensor,
    info: SamplingBatchInfo,
    *,
    nodes: int,
    positions: Tensor,
    history: TokenHistory | None,
    result: VerifyResult,
) -> Choice:
    """Do as `node_choices` for the nodes on accepted paths: choose after the root, then
    after the accepted child, and so on. For a path that has ended, launches exit at
    once.

    Args:
        result: overwritten.
    """
    draws = NodeDraws(logits, info, nodes=nodes, positions=positions, history=history)
    choices = draws.choice.token_ids.view_as(tree.tokens)
    rows = torch.empty_like(result.accept_lens)
    for _ in range(result.accept_index.shape[1]):
        walk_tree(tree, choices, result=result, rows=rows)
        if row_ops.on_host(rows) and not bool((rows >= 0).any()):
            break
        draws.draw(rows)
    return draws.choice


def node_history(
    tree: DraftTree, *, token_table: Tensor, req_pool_indices: Tensor, max_len: int
) -> TokenHistory:
    """Return the tokens on the path to each node, including its own.

    Args:
        token_table: int32 [table rows, width], including the root's token.
        req_pool_indices: int64 [b].
        max_len: upper bound of the tokens on any path.

    Returns:
        b * D rows with their own table.
    """
    bs, nodes = tree.tokens.shape
    width = min(max_len, token_table.shape[1])
    known = token_table[:, :width].index_select(0, req_pool_indices)
    # Nodes off the path go to one extra column, which is never read.
    table = torch.nn.functional.pad(known, (0, 1)).repeat_interleave(nodes, dim=0)
    columns = tree.positions[:, None, :].expand(bs, nodes, nodes)
    columns = columns.where(tree.mask, width).reshape(bs * nodes, nodes)
    tokens = tree.tokens.to(table.dtype)[:, None, :].expand(bs, nodes, nodes)
    table.scatter_(1, columns, tokens.reshape(bs * nodes, nodes))
    return TokenHistory(
        token_table=table,
        req_pool_indices=torch.arange(bs * nodes, device=table.device),
        lens=tree.positions.view(-1) + 1,
        max_len=width,
    )


def accepted_logprobs(
    edited: Tensor,
    info: SamplingBatchInfo,
    *,
    node_rows: Tensor,
    tokens: Tensor,
    request: LogprobRequest,
) -> LogprobResult:
    """Compute logprobs of the tokens gained, S + 1 entries for each request that asks.
    Entries past a request's accept length are meaningless.

    Args:
        edited: [b * D, V], from `accept_drafts`.
        info: sampling state of the b requests.
        node_rows, tokens: int64 [b, S + 1], from `gather_accepted`.
        request: logprobs that the b requests want.
    """
    width = tokens.shape[1]
    temperatures = info.temperatures
    if request.rows is not None:
        node_rows = node_rows.index_select(0, request.rows)
        tokens = tokens.index_select(0, request.rows)
        temperatures = temperatures.index_select(0, request.rows)
    named_ids = request.named_ids
    if named_ids is not None:
        named_ids = named_ids.repeat_interleave(width, dim=0)
    return compute_logprobs(
        divide_rows(
            edited.index_select(0, node_rows.reshape(-1)),
            temperatures.repeat_interleave(width),
        ),
        tokens.reshape(-1),
        LogprobRequest(
            rows=None,
            top_ks=tuple(k for k in request.top_ks for _ in range(width)),
            named=tuple(ids for ids in request.named for _ in range(width)),
            named_ids=named_ids,
        ),
    )
