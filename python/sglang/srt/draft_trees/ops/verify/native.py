"""Native forms of tree verification. They unpack buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sglang_kernels import ops

if TYPE_CHECKING:
    from sglang.srt.draft_trees.buffers import DraftTree, VerifyResult


def verify_tree_greedy(
    tree: DraftTree, target_ids: Tensor, *, result: VerifyResult
) -> None:
    ops.tree_verify_greedy(
        tree.tokens,
        tree.parent_index,
        target_ids,
        [result.predict, result.accept_index, result.accept_lens],
    )


def verify_tree_target_only(
    tree: DraftTree,
    target_probs: Tensor,
    totals: Tensor,
    *,
    keys: Tensor,
    threshold_single: float,
    threshold_acc: float,
    result: VerifyResult,
) -> None:
    ops.tree_verify_sampled(
        tree.tokens,
        tree.parent_index,
        tree.positions,
        target_probs,
        totals,
        keys,
        [threshold_single, threshold_acc],
        [result.predict, result.accept_index, result.accept_lens, result.rejected],
    )


def gather_accepted(
    result: VerifyResult,
    *,
    tokens: Tensor,
    node_rows: Tensor,
    bonus_tokens: Tensor,
) -> None:
    ops.tree_gather_accepted(
        [result.predict, result.accept_index, result.accept_lens],
        tokens,
        node_rows,
        bonus_tokens,
    )
