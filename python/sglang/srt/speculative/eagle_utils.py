"""Sizes and choices of speculation: what the draft reads, what it proposes, and which
of its proposals the target accepts.

Everything runs on the device without waiting for it, shapes depending on the batch
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.configs.draft_config import hidden_source_size, num_hidden_sources
from sglang.srt.layers.logprobs import LogprobRequest, LogprobResult, compute_logprobs
from sglang.srt.layers.sampler import filtered_probs, process_logits, select_pytorch
from sglang.srt.sampling.penalties import TokenHistory
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ops.buffers import DraftCandidates, DraftTree, VerifyResult
from sglang.srt.speculative.ops.tree import top_k_probs
from sglang.srt.speculative.ops.verify import (
    verify_tree_greedy,
    verify_tree_target_only,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

EAGLE3 = "EAGLE3"
STANDALONE = "STANDALONE"


def get_draft_hidden_dim(model_runner: ModelRunner) -> int | None:
    """Channels of the target's hidden states that a draft worker's extends read.

    The one source of truth: worker, buffers and graphs ask here.

    Args:
        model_runner: the draft worker's.

    Returns:
        None where the draft is a language model of its own.
    """
    config = model_runner.model_config
    if model_runner.spec_algorithm == STANDALONE:
        return None
    if model_runner.spec_algorithm != EAGLE3:
        return config.hidden_size
    return num_hidden_sources(config) * hidden_source_size(config)


def propose(logits: Tensor, topk: int) -> DraftCandidates:
    """The `topk` best next tokens of each row of the draft's logits [R, V']."""
    found = DraftCandidates.allocate(len(logits), topk, device=logits.device)
    top_k_probs(logits, probs=found.probs, ids=found.ids)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptThresholds:
    """`--speculative-accept-threshold-single` and `-acc`; 1 keeps the target's
    distribution exactly."""

    single: float
    acc: float


def accept_drafts(
    tree: DraftTree,
    logits: Tensor,
    info: SamplingBatchInfo,
    *,
    history: TokenHistory | None,
    thresholds: AcceptThresholds,
    result: VerifyResult,
) -> Tensor:
    """Decide which nodes of b trees are accepted, and the token behind the last one.

    Args:
        logits: [b * D, V], the target's after each node.
        info: of the b requests; where it carries a mask, one row per node.
        history: tokens on the path to each node, where a row has a penalty.
        result: b rows, written.

    Returns:
        [b * D, V]: the logits that tokens were chosen by, edited as the requests ask.
    """
    nodes = tree.tokens.shape[1]
    decided = tree.positions.view(-1) + 1
    if info.is_plain_greedy:
        choices = select_pytorch(logits, info, decided)
        verify_tree_greedy(tree, choices.view(-1, nodes), result=result)
        return logits
    keys = info.seeds
    info = info.repeat_rows(nodes, keep_mask=True)
    processed = process_logits(logits.float(), info, positions=decided, history=history)
    if info.is_all_greedy:
        choices = select_pytorch(processed, info, decided)
        verify_tree_greedy(tree, choices.view(-1, nodes), result=result)
        return processed
    weights = filtered_probs(processed, info)
    if info.has_greedy:
        best = processed.argmax(dim=-1, keepdim=True)
        certain = torch.zeros_like(weights).scatter_(1, best, 1.0)
        weights = certain.where(info.greedy_rows[:, None], weights)
    verify_tree_target_only(
        tree,
        weights,
        weights.sum(dim=-1),
        keys=keys,
        threshold_single=thresholds.single,
        threshold_acc=thresholds.acc,
        result=result,
    )
    return processed


def node_history(
    tree: DraftTree, *, token_table: Tensor, req_pool_indices: Tensor, max_len: int
) -> TokenHistory:
    """The tokens on the path to each node, itself included.

    Args:
        token_table: int32 [rows, width], with the root's token.
        req_pool_indices: int64 [b].
        max_len: upper bound of the tokens on any path.

    Returns:
        b * D rows with a table of their own.
    """
    rows, nodes = tree.tokens.shape
    width = min(max_len, token_table.shape[1])
    known = token_table[:, :width].index_select(0, req_pool_indices)
    # What a node is no descendant of goes to a column behind all tokens.
    table = torch.nn.functional.pad(known, (0, 1)).repeat_interleave(nodes, dim=0)
    columns = tree.positions[:, None, :].expand(rows, nodes, nodes)
    columns = columns.where(tree.mask, width).reshape(rows * nodes, nodes)
    tokens = tree.tokens.to(table.dtype)[:, None, :].expand(rows, nodes, nodes)
    table.scatter_(1, columns, tokens.reshape(rows * nodes, nodes))
    return TokenHistory(
        token_table=table,
        req_pool_indices=torch.arange(rows * nodes, device=table.device),
        lens=tree.positions.view(-1) + 1,
        max_len=width,
    )


def accepted_logprobs(
    processed: Tensor, *, node_rows: Tensor, tokens: Tensor, request: LogprobRequest
) -> LogprobResult:
    """Logprobs of the tokens gained, S + 1 entries for each row that asks; entries
    behind a request's accept length mean nothing.

    Args:
        processed: [b * D, V], from `accept_drafts`.
        node_rows, tokens: int64 [b, S + 1], from `gather_accepted`.
        request: over the b requests.
    """
    width = tokens.shape[1]
    if request.rows is not None:
        node_rows = node_rows.index_select(0, request.rows)
        tokens = tokens.index_select(0, request.rows)
    top_ks = tuple(k for k in request.top_ks for _ in range(width))
    return compute_logprobs(
        processed.index_select(0, node_rows.reshape(-1)).float(),
        tokens.reshape(-1),
        LogprobRequest(rows=None, top_ks=top_ks),
    )


def simulate_acceptance(result: VerifyResult, *, mean: float) -> None:
    """Overwrite what was accepted: the first nodes of each tree, `mean` tokens on
    average, drawn anew for every row. For benchmarks with random weights only.
    """
    rows, width = result.accept_index.shape
    nodes = result.predict.shape[1]
    device = result.predict.device
    base = int(mean)
    noise = torch.rand(rows, device=device)
    lens = (base + (noise < mean - base).long()).clamp_(1, width)
    column = torch.arange(width, device=device)
    places = torch.arange(rows, device=device)[:, None] * nodes + column
    result.accept_index.copy_(places.where(column < lens[:, None], -1))
    result.accept_lens.copy_(lens)
