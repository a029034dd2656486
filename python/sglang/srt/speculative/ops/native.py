"""Native implementations of the tree ops: they take buffers apart.

Each has the parameters of its torch reference and is imported at its first call, as the
kernels may not be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sglang.srt.speculative.ops.tree import require_topk
from sglang_kernels import ops

if TYPE_CHECKING:
    from sglang.srt.speculative.draft_layout import TreeShape
    from sglang.srt.speculative.ops.buffers import DraftLevels, DraftTree, VerifyResult


def top_k_probs(logits: Tensor, *, probs: Tensor, ids: Tensor) -> None:
    require_topk(logits, ids)
    ops.tree_top_k(logits, probs, ids)


def select_top_k(
    level: int,
    *,
    shape: TreeShape,
    topk_p: Tensor,
    topk_index: Tensor,
    hot_token_id: Tensor | None,
    levels: DraftLevels,
    input_ids: Tensor,
    hidden_rows: Tensor,
) -> None:
    ops.tree_select(
        level,
        shape.num_steps,
        topk_p,
        topk_index,
        hot_token_id,
        [levels.scores, levels.tokens, levels.parents, levels.beam_scores],
        input_ids,
        hidden_rows,
    )


def build_tree(
    levels: DraftLevels,
    *,
    shape: TreeShape,
    root_tokens: Tensor,
    seq_lens: Tensor,
    tree: DraftTree,
) -> None:
    ops.tree_build(
        [levels.scores, levels.tokens, levels.parents],
        shape.topk,
        root_tokens,
        seq_lens,
        [
            tree.tokens,
            tree.positions,
            tree.parent_index,
            tree.next_token,
            tree.next_sibling,
            tree.mask,
            tree.selected,
        ],
    )


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
