"""Triton kernel that builds draft trees: a program per request.

`op.py` describes the semantics and has the oracle.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.draft_trees.ops.tree.triton_scores import NO_KEY, score_key
from sglang.srt.draft_trees.ops.tree.triton_select import require_levels
from sglang.srt.utils.triton_launch import (
    block_of,
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.draft_trees.buffers import DraftLevels, DraftTree

_RANK_CHUNK = 32


class Sizes(NamedTuple):
    """Constants that the kernel is compiled for; its argument SIZES.

    Fields:
        topk, steps, nodes, candidates, groups: sizes of a tree, as in `TreeShape`.
        nodes_block, candidates_block: `nodes` and `candidates` as powers of two.
        chunk: candidates that each candidate is compared with at a time.
    """

    topk: int
    steps: int
    nodes: int
    nodes_block: int
    candidates: int
    candidates_block: int
    groups: int
    chunk: int


def make_sizes(shape: TreeShape) -> Sizes:
    return Sizes(
        topk=shape.topk,
        steps=shape.num_steps,
        nodes=shape.num_draft_tokens,
        nodes_block=block_of(shape.num_draft_tokens),
        candidates=shape.num_candidates,
        candidates_block=block_of(shape.num_candidates),
        groups=shape.num_groups,
        chunk=_RANK_CHUNK,
    )


@triton.jit
def build_kernel(
    scores,
    candidate_tokens,
    group_parents,
    root_tokens,
    seq_lens,
    tokens,
    positions,
    parent_index,
    next_token,
    next_sibling,
    mask,
    selected,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    NODES: tl.constexpr = SIZES.nodes
    NODES_BLOCK: tl.constexpr = SIZES.nodes_block
    CANDIDATES: tl.constexpr = SIZES.candidates
    q = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    q64 = q.to(tl.int64)
    picks = selected + q64 * (NODES - 1)
    _select(scores + q64 * CANDIDATES, picks, SIZES)
    # Other threads than the writers read the nodes back.
    tl.debug_barrier()
    node = tl.arange(0, NODES_BLOCK)
    is_node = node < NODES
    is_draft = is_node & (node > 0)
    pick = tl.load(picks + node - 1, mask=is_draft, other=-1)
    parents = group_parents + q64 * SIZES.groups
    parent = _find_parents(pick, node, is_draft, parents, SIZES.topk)
    token = tl.load(candidate_tokens + q64 * CANDIDATES + pick, mask=is_draft, other=0)
    token = tl.where(node == 0, tl.load(root_tokens + q), token)
    first = q64 * NODES
    tl.store(tokens + first + node, token, mask=is_node)
    place = tl.where(parent >= 0, first + parent, -1)
    tl.store(parent_index + first + node, place, mask=is_node)
    column = node[None, :]
    is_child = column == node[:, None]
    seen = is_child
    # Padding beyond the last node has no parent and belongs to none.
    is_child = (parent[None, :] == node[:, None]) & (parent[None, :] >= 0)
    child = tl.min(tl.where(is_child, column, NODES_BLOCK), axis=1)
    child = tl.where(child < NODES_BLOCK, child, -1)
    tl.store(next_token + first + node, child.to(tl.int64), mask=is_node)
    is_sibling = (parent[None, :] == parent[:, None]) & (parent[:, None] >= 0)
    is_sibling = is_sibling & (column > node[:, None])
    sibling = tl.min(tl.where(is_sibling, column, NODES_BLOCK), axis=1)
    sibling = tl.where(sibling < NODES_BLOCK, sibling, -1)
    tl.store(next_sibling + first + node, sibling.to(tl.int64), mask=is_node)
    tl.debug_barrier()
    depth = tl.zeros([NODES_BLOCK], dtype=tl.int64)
    up = parent
    for _ in range(SIZES.steps):
        has_parent = up >= 0
        depth += has_parent.to(tl.int64)
        seen = seen | (up[:, None] == column)
        above = tl.load(parent_index + first + up, mask=has_parent, other=-1)
        up = tl.where(above >= 0, above - first, -1).to(tl.int32)
    tl.store(positions + first + node, tl.load(seq_lens + q) + depth, mask=is_node)
    cell = first * NODES + node[:, None] * NODES + column
    tl.store(mask + cell, seen.to(tl.uint8), mask=is_node[:, None] & (column < NODES))


@triton.jit
def _select(scores, picks, SIZES: tl.constexpr):
    """Store the flat indices of the best nodes - 1 candidates in ascending order."""
    CANDIDATES: tl.constexpr = SIZES.candidates
    BLOCK: tl.constexpr = SIZES.candidates_block
    CHUNK: tl.constexpr = SIZES.chunk
    flat = tl.arange(0, BLOCK)
    inside = flat < CANDIDATES
    key = score_key(tl.load(scores + flat, mask=inside, other=0.0))
    key = tl.where(inside, key, NO_KEY)
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for begin in range(0, CANDIDATES, CHUNK):
        rival = begin + tl.arange(0, CHUNK)
        is_rival = rival < CANDIDATES
        rival_key = score_key(tl.load(scores + rival, mask=is_rival, other=0.0))
        rival_key = tl.where(is_rival, rival_key, NO_KEY)
        is_equal = rival_key[None, :] == key[:, None]
        beats = rival_key[None, :] > key[:, None]
        beats = beats | (is_equal & (rival[None, :] < flat[:, None]))
        rank += tl.sum(beats.to(tl.int32), axis=1)
    is_picked = inside & (rank < SIZES.nodes - 1)
    place = tl.cumsum(is_picked.to(tl.int32), axis=0) - 1
    tl.store(picks + place, flat.to(tl.int64), mask=is_picked)


@triton.jit
def _find_parents(pick, node, is_draft, group_parents, K: tl.constexpr):
    """Return int32: the parent of each node, -1 for the root and unlinked nodes."""
    group = pick // K
    expanded = tl.load(group_parents + group, mask=is_draft & (group > 0), other=-1)
    is_before = _place_to_level(expanded, K) == _place_to_level(pick, K) - 1
    is_parent = (expanded[:, None] == pick[None, :]) & is_draft[None, :]
    found = tl.sum(tl.where(is_parent, node[None, :], 0), axis=1)
    found = tl.where(is_before & (found > 0), found, -1)
    found = tl.where(group == 0, 0, found)
    return tl.where(is_draft, found, -1).to(tl.int32)


@triton.jit
def _place_to_level(place, K: tl.constexpr):
    return tl.where(place < K, 0, 1 + (place - K) // (K * K))


def build_tree(
    levels: DraftLevels,
    *,
    shape: TreeShape,
    root_tokens: Tensor,
    seq_lens: Tensor,
    tree: DraftTree,
) -> None:
    """See `op.py`."""
    rows, nodes = tree.tokens.shape[0], shape.num_draft_tokens
    op = "build_tree"
    require_levels(op, levels, shape)
    require(op, rows, torch.int64, root_tokens=root_tokens, seq_lens=seq_lens)
    require(
        op,
        rows * nodes,
        torch.int64,
        tokens=tree.tokens,
        positions=tree.positions,
        parent_index=tree.parent_index,
        next_token=tree.next_token,
        next_sibling=tree.next_sibling,
    )
    require(op, rows * nodes * nodes, torch.bool, mask=tree.mask)
    require(op, rows * (nodes - 1), torch.int64, selected=tree.selected)
    if rows == 0:
        return
    build_kernel[(rows,)](
        levels.scores,
        levels.tokens,
        levels.parents,
        root_tokens,
        seq_lens,
        tree.tokens,
        tree.positions,
        tree.parent_index,
        tree.next_token,
        tree.next_sibling,
        tree.mask.view(torch.uint8),
        tree.selected,
        SIZES=make_sizes(shape),
        num_warps=build_warps(shape),
        **launch_options(root_tokens.device),
    )


def build_warps(shape: TreeShape) -> int:
    """Return enough warps that a program's comparisons stay in registers."""
    tile = max(
        block_of(shape.num_draft_tokens) ** 2,
        block_of(shape.num_candidates) * _RANK_CHUNK,
    )
    return min(max(tile // 2048, 1), 16)
