"""Draft trees: candidates of one draft step, branches that survive it, and the tree
that goes to verification. Knows no models, KV or requests.

Ties always go to the lower index, and a score that is NaN counts as minus infinity, so
results depend neither on the device nor on the batch. Each op writes into tensors of
the caller, has fixed shapes and does not wait for the device; only the reference of
`build_tree` reads everything on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.utils.dispatch import Op

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.draft_trees.buffers import DraftLevels, DraftTree

_NATIVE = "sglang.srt.draft_trees.ops.tree.native:"
_TRITON = "sglang.srt.draft_trees.ops.tree."


def top_k_probs_ref(logits: Tensor, *, probs: Tensor, ids: Tensor) -> None:
    """Find the K most probable ids of each row and their softmax probabilities.

    Best first, ranked by logit. With K = 1 the probability is 1, because a chain has
    nothing to compare. A NaN probability (infinite logits) becomes 0.

    Args:
        logits: [R, V'] float32, bfloat16 or float16, rows contiguous; V' >= K.
        probs: [R, K] float32, written. ids: [R, K] int64, written, in the draft's
            vocabulary and distinct within a row.

    Raises:
        ValueError: K exceeds V'.
    """
    require_topk(logits, ids)
    k = ids.shape[1]
    values = _nan_last(logits.float())
    ids.copy_(_best(values, k))
    if k == 1:
        probs.fill_(1.0)
        return
    chosen = torch.softmax(values, dim=-1).gather(1, ids)
    probs.copy_(chosen.where(chosen.isfinite(), 0.0))


top_k_probs = Op(
    reference=top_k_probs_ref,
    native=_NATIVE + "top_k_probs",
    triton=_TRITON + "triton_top_k:top_k_probs",
)


def require_topk(logits: Tensor, ids: Tensor) -> None:
    """Raise ValueError if `top_k_probs` is asked for more ids than there are."""
    if ids.shape[1] > logits.shape[1]:
        raise ValueError(
            f"top_k_probs: topk={ids.shape[1]} of a draft vocabulary of "
            f"{logits.shape[1]}; use a smaller --speculative-eagle-topk"
        )


def select_top_k_ref(
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
    """Record the candidates of a draft level and choose the K branches that go on.

    Level 0 has one group of K candidates per request, and all of them go on. Later,
    branch r proposes K candidates with scores beam_scores[r] * p, and the best K of the
    K * K go on. Branch j of the next level is the j-th best; it may descend from any
    branch.

    Args:
        level: 0 .. S - 1. shape: the numbers K, S.
        topk_p, topk_index: candidates of the last forward, from `top_k_probs`: [b, K]
            at level 0, else [b * K, K]; float32 and int64, contiguous.
        hot_token_id: [V'] int64, the target's id for each draft id, or None if they are
            the same. Ids are mapped only here; state kept between iterations stays
            unmapped.
        levels: written: the level's scores and tokens, the parents of the groups of the
            next level (none at the last one), and the beam.
        input_ids: [b * K] int64, written: the branches' tokens as target ids.
        hidden_rows: [b * K] int64, written: for each branch, the row of the hidden
            states it continues from, in the forward that proposed it: request q at
            level 0, else row q * K + r.
    """
    k = shape.topk
    rows = levels.scores.shape[0]
    tokens = topk_index if hot_token_id is None else hot_token_id[topk_index]
    request = torch.arange(rows, device=topk_p.device)[:, None]
    if level == 0:
        levels.scores[:, :k] = topk_p
        levels.tokens[:, :k] = tokens
        levels.parents[:, 0] = -1
        if shape.num_steps > 1:
            levels.parents[:, 1 : k + 1] = torch.arange(k, device=topk_p.device)
        levels.beam_scores.copy_(topk_p)
        input_ids.copy_(tokens.reshape(-1))
        hidden_rows.copy_(request.expand(rows, k).reshape(-1))
        return
    begin = k + k * k * (level - 1)
    scores = (levels.beam_scores[:, :, None] * topk_p.view(rows, k, k)).view(rows, -1)
    tokens = tokens.view(rows, k * k)
    levels.scores[:, begin : begin + k * k] = scores
    levels.tokens[:, begin : begin + k * k] = tokens
    chosen = _best(_nan_last(scores), k)
    if level < shape.num_steps - 1:
        levels.parents[:, 1 + k * level : 1 + k * (level + 1)] = begin + chosen
    levels.beam_scores.copy_(scores.gather(1, chosen))
    input_ids.copy_(tokens.gather(1, chosen).view(-1))
    hidden_rows.copy_((request * k + chosen // k).view(-1))


select_top_k = Op(
    reference=select_top_k_ref,
    native=_NATIVE + "select_top_k",
    triton=_TRITON + "triton_select:select_top_k",
    place="topk_p",
)


def build_tree_ref(
    levels: DraftLevels,
    *,
    shape: TreeShape,
    root_tokens: Tensor,
    seq_lens: Tensor,
    tree: DraftTree,
) -> None:
    """Keep the best D - 1 candidates of all levels and link them into a tree.

    Nodes are numbered by flat index, so parents precede children and shallow nodes
    precede deep ones. A score never exceeds its parent's, so the parent of a selected
    node is selected too. Garbage scores can break that; such a node is left unlinked
    (see `DraftTree.parent_index`). Whatever `levels` holds, every index written is in
    range and every chain ends.

    Args:
        levels: b requests, all S levels recorded. shape: the numbers K, S, D.
        root_tokens: [b] int64, the newest token, whose KV is not written yet.
        seq_lens: [b] int64, KV length, which is also the root's position.
        tree: b rows, written.
    """
    nodes = shape.num_draft_tokens
    best = _best(_nan_last(levels.scores), nodes - 1).sort(dim=-1).values
    tree.selected.copy_(best)
    tree.tokens[:, 0] = root_tokens
    tree.tokens[:, 1:] = levels.tokens.gather(1, best)
    all_parents = levels.parents.tolist()
    for q, (selected, seq_len) in enumerate(
        zip(best.tolist(), seq_lens.tolist(), strict=True)
    ):
        parents = _find_parents(selected, all_parents[q], shape.topk)
        depths = [0] * nodes
        children: list[list[int]] = [[] for _ in range(nodes)]
        mask = torch.eye(nodes, dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                depths[node] = depths[parent] + 1
                children[parent].append(node)
                mask[node] |= mask[parent]
        siblings = [-1] * nodes
        for group in children:
            for node, sibling in zip(group, group[1:], strict=False):
                siblings[node] = sibling
        columns = {
            "positions": [seq_len + depth for depth in depths],
            "parent_index": [p if p < 0 else q * nodes + p for p in parents],
            "next_token": [group[0] if group else -1 for group in children],
            "next_sibling": siblings,
        }
        for name, values in columns.items():
            getattr(tree, name)[q] = torch.tensor(list(values))
        tree.mask[q] = mask


build_tree = Op(
    reference=build_tree_ref,
    native=_NATIVE + "build_tree",
    triton=_TRITON + "triton_build:build_tree",
    place="levels.scores",
)


def _find_parents(selected: list[int], parents: list[int], topk: int) -> list[int]:
    """Return the parent of each node of one request; -1 for the root and unlinked
    nodes."""
    found = [-1]
    for place in selected:
        group = place // topk
        if group == 0:
            found.append(0)
            continue
        expanded = parents[group]
        # A parent must be one level up, or the depth would have no bound.
        is_before = _place_to_level(expanded, topk) == _place_to_level(place, topk) - 1
        is_linked = is_before and expanded in selected
        found.append(1 + selected.index(expanded) if is_linked else -1)
    return found


def _place_to_level(place: int, topk: int) -> int:
    return 0 if place < topk else 1 + (place - topk) // topk**2


def _nan_last(values: Tensor) -> Tensor:
    return values.where(~values.isnan(), float("-inf"))


def _best(values: Tensor, k: int) -> Tensor:
    """Return [R, k] int64: indices of the largest values per row, lower index first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
