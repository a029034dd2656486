"""Native forms of the ops that build draft trees. They unpack buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sglang.srt.draft_trees.ops.tree.op import require_topk
from sglang_kernels import ops

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.draft_trees.buffers import DraftLevels, DraftTree


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
