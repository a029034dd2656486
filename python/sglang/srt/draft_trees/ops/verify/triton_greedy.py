"""Triton kernels of greedy tree verification and of the accepted path: a program walks
each request's tree.

`op.py` describes the semantics and has the oracles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.utils.triton_launch import (
    block_of,
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from sglang.srt.draft_trees.buffers import DraftTree, VerifyResult


class Walk(NamedTuple):
    """Sizes of the trees that a walk kernel is compiled for; its argument WALK.

    Fields:
        nodes, steps: sizes of a tree; topk: most children of a node.
        nodes_block, path_block, topk_block: powers of two that hold the nodes, the root
            with `steps` nodes, and the children.
    """

    nodes: int
    nodes_block: int
    steps: int
    path_block: int
    topk: int
    topk_block: int


def make_walk(*, nodes: int, steps: int, topk: int) -> Walk:
    return Walk(
        nodes=nodes,
        nodes_block=block_of(nodes),
        steps=steps,
        path_block=block_of(steps + 1),
        topk=topk,
        topk_block=block_of(topk),
    )


@triton.jit
def greedy_kernel(
    tokens,
    parent_index,
    target_ids,
    predict,
    accept_index,
    accept_lens,
    open_rows,
    WALK: tl.constexpr,
    PDL: tl.constexpr,
):
    NODES: tl.constexpr = WALK.nodes
    NODES_BLOCK: tl.constexpr = WALK.nodes_block
    STEPS: tl.constexpr = WALK.steps
    q = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    first = q.to(tl.int64) * NODES
    node = tl.arange(0, NODES_BLOCK)
    is_node = node < NODES
    token = tl.load(tokens + first + node, mask=is_node, other=0)
    parent = tl.load(parent_index + first + node, mask=is_node, other=-1)
    target = tl.load(target_ids + first + node, mask=is_node, other=0)
    column = tl.arange(0, WALK.path_block)
    path = tl.where(column == 0, first, tl.full([WALK.path_block], -1, tl.int64))
    current = tl.program_id(0) * 0
    length = current + 1
    goes_on = length == 1
    for _ in range(STEPS):
        wanted = tl.sum(tl.where(node == current, target, 0), axis=0)
        is_match = (parent == first + current) & (token == wanted)
        child = tl.min(tl.where(is_match, node, NODES_BLOCK), axis=0)
        goes_on = goes_on & (child < NODES_BLOCK)
        path = tl.where((column == length) & goes_on, first + child, path)
        current = tl.where(goes_on, child, current)
        length = tl.where(goes_on, length + 1, length)
    # An accepted child's token is also the target's choice at its parent.
    on_path = tl.max(((first + node)[:, None] == path[None, :]).to(tl.int32), axis=1)
    following = tl.where(on_path > 0, target, 0)
    tl.store(predict + first + node, following, mask=is_node)
    tl.store(accept_index + q * (STEPS + 1) + column, path, mask=column <= STEPS)
    tl.store(accept_lens + q, length.to(tl.int64))
    if open_rows is not None:
        choice = tl.sum(tl.where(node == current, target, 0), axis=0)
        tl.store(open_rows + q, tl.where(choice < 0, first + current, -1))


def verify_tree_greedy(
    tree: DraftTree, target_ids: Tensor, *, result: VerifyResult
) -> None:
    """See `op.py`."""
    _walk("verify_tree_greedy", tree, target_ids, result, None)


def walk_tree(
    tree: DraftTree, target_ids: Tensor, *, result: VerifyResult, rows: Tensor
) -> None:
    """See `op.py`."""
    require("walk_tree", len(tree.tokens), torch.int64, rows=rows)
    _walk("walk_tree", tree, target_ids, result, rows)


def _walk(
    op: str,
    tree: DraftTree,
    target_ids: Tensor,
    result: VerifyResult,
    open_rows: Tensor | None,
) -> None:
    rows, nodes = tree.tokens.shape
    steps = require_result(op, tree, result)
    require(op, rows * nodes, torch.int64, target_ids=target_ids)
    if rows == 0:
        return
    greedy_kernel[(rows,)](
        tree.tokens,
        tree.parent_index,
        target_ids,
        result.predict,
        result.accept_index,
        result.accept_lens,
        open_rows,
        WALK=make_walk(nodes=nodes, steps=steps, topk=result.rejected.shape[1]),
        num_warps=1,
        **launch_options(target_ids.device),
    )


def require_result(op: str, tree: DraftTree, result: VerifyResult) -> int:
    """Return how many drafts can be accepted. Raises ValueError unless tree and result
    have the layouts that the kernels index."""
    rows, nodes = tree.tokens.shape
    require(
        op,
        rows * nodes,
        torch.int64,
        tokens=tree.tokens,
        parent_index=tree.parent_index,
        positions=tree.positions,
        predict=result.predict,
    )
    width = result.accept_index.shape[1]
    require(op, rows * width, torch.int64, accept_index=result.accept_index)
    require(op, rows, torch.int64, accept_lens=result.accept_lens)
    return width - 1


@triton.jit
def gather_kernel(
    predict,
    accept_index,
    accept_lens,
    tokens,
    node_rows,
    bonus_tokens,
    PATH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    q = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    last = tl.load(accept_lens + q) - 1
    column = tl.arange(0, BLOCK)
    place = tl.load(accept_index + q * PATH + tl.minimum(column, last))
    token = tl.load(predict + place)
    tl.store(tokens + q * WIDTH + column, token, mask=column < WIDTH)
    tl.store(node_rows + q * PATH + column, place, mask=column < PATH)
    final = tl.load(predict + tl.load(accept_index + q * PATH + last))
    tl.store(bonus_tokens + q, final)


def gather_accepted(
    result: VerifyResult,
    *,
    tokens: Tensor,
    node_rows: Tensor,
    bonus_tokens: Tensor,
) -> None:
    """See `op.py`."""
    op = "gather_accepted"
    rows, path = result.accept_index.shape
    width = tokens.shape[1]
    index = result.accept_index
    require(op, rows * path, torch.int64, accept_index=index, node_rows=node_rows)
    require(op, rows * width, torch.int64, tokens=tokens)
    require(op, rows, torch.int64, bonus_tokens=bonus_tokens)
    if rows == 0:
        return
    gather_kernel[(rows,)](
        result.predict,
        result.accept_index,
        result.accept_lens,
        tokens,
        node_rows,
        bonus_tokens,
        PATH=path,
        WIDTH=width,
        BLOCK=block_of(max(path, width)),
        num_warps=1,
        **launch_options(tokens.device),
    )
