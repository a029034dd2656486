"""Triton kernels of sampling verification: a program walks each request's tree, and
programs that share the vocabulary draw the bonus.

`op.py` describes the semantics and has the oracles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.draft_trees.ops.verify.triton_greedy import make_walk, require_result
from sglang.srt.sampling.ops.triton_draw import split_size
from sglang.srt.sampling.ops.triton_noise import uniform
from sglang.srt.utils.triton_launch import (
    Scratch,
    block_of,
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from sglang.srt.draft_trees.buffers import DraftTree, VerifyResult

BONUS_STREAM = tl.constexpr(0x5851F42D4C957F2D)
# Per request and split: sums of the weights with and without the rejected tokens.
_SCRATCH = Scratch(partial_bytes=4 << 20, counters=1 << 16)


@triton.jit
def walk_kernel(
    tokens,
    parent_index,
    positions,
    probs,
    totals,
    keys,
    predict,
    accept_index,
    accept_lens,
    rejected,
    vocab,
    probs_stride,
    SINGLE: tl.constexpr,
    ACCUMULATED: tl.constexpr,
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
    token = tl.load(tokens + first + node, mask=is_node, other=-1)
    parent = tl.load(parent_index + first + node, mask=is_node, other=-1)
    key = tl.load(keys + q)
    column = tl.arange(0, WALK.path_block)
    path = tl.where(column == 0, first, tl.full([WALK.path_block], -1, tl.int64))
    following = tl.zeros([NODES_BLOCK], dtype=tl.int64)
    is_rejected = node < 0
    current = tl.program_id(0) * 0
    length = current + 1
    goes_on = length == 1
    for _ in range(STEPS):
        place = first + current
        total = tl.load(totals + place).to(tl.float64)
        coin = uniform(key, tl.load(positions + place) + 1)
        is_child = (parent == place) & goes_on
        is_known = is_child & (token >= 0) & (token < vocab)
        weight = tl.load(
            probs + place * probs_stride + token, mask=is_known, other=0.0
        ).to(tl.float64)
        mass = tl.cumsum(weight, axis=0)
        is_likely = weight >= total * SINGLE
        takes = (coin * total * ACCUMULATED < mass) | is_likely
        takes = takes & is_child & (weight > 0.0)
        child = tl.min(tl.where(takes, node, NODES_BLOCK), axis=0)
        is_taken = child < NODES_BLOCK
        # A walk that stops here has rejected all children of its last node.
        is_rejected = is_rejected | (is_child & (is_taken == 0))
        goes_on = goes_on & is_taken
        chosen = tl.sum(tl.where(node == child, token, 0), axis=0)
        following = tl.where((node == current) & goes_on, chosen, following)
        path = tl.where((column == length) & goes_on, first + child, path)
        current = tl.where(goes_on, child, current)
        length = tl.where(goes_on, length + 1, length)
    tl.store(predict + first + node, following, mask=is_node)
    tl.store(accept_index + q * (STEPS + 1) + column, path, mask=column <= STEPS)
    tl.store(accept_lens + q, length.to(tl.int64))
    rank = tl.cumsum(is_rejected.to(tl.int32), axis=0) - 1
    branch = tl.arange(0, WALK.topk_block)
    is_at = (rank[None, :] == branch[:, None]) & is_rejected[None, :]
    left = tl.sum(tl.where(is_at, token[None, :] + 1, 0), axis=1) - 1
    tl.store(rejected + q * WALK.topk + branch, left, mask=branch < WALK.topk)


@triton.jit
def bonus_kernel(
    positions,
    probs,
    keys,
    predict,
    accept_index,
    accept_lens,
    rejected,
    partials,
    counters,
    vocab,
    probs_stride,
    PATH: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0)
    q = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    last = tl.load(accept_lens + q) - 1
    place = tl.load(accept_index + q * PATH + last)
    row = probs + place * probs_stride
    weight = tl.load(
        row + split * BLOCK + tl.arange(0, BLOCK),
        mask=split * BLOCK + tl.arange(0, BLOCK) < vocab,
        other=0.0,
    )
    rest = _without(weight, split * BLOCK + tl.arange(0, BLOCK), rejected + q * K, K)
    slot = (q * SPLITS + split) * 2
    tl.store(partials + slot, tl.sum(rest, axis=0))
    tl.store(partials + slot + 1, tl.sum(weight, axis=0))
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + q, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        tl.store(counters + q, 0)
        noise = uniform(
            tl.load(keys + q) ^ BONUS_STREAM, tl.load(positions + place) + 1
        )
        part = tl.arange(0, SPLITS_BLOCK)
        slots = (q * SPLITS + part) * 2
        mine = tl.load(
            partials + slots, mask=part < SPLITS, other=0.0, cache_modifier=".cg"
        )
        # Without the rejected ids rounding may leave nothing; then they count.
        has_rest = tl.sum(mine, axis=0) > 0.0
        if has_rest == 0:
            mine = tl.load(
                partials + slots + 1,
                mask=part < SPLITS,
                other=0.0,
                cache_modifier=".cg",
            )
        ends = tl.cumsum(mine.to(tl.float64), axis=0)
        target = noise * tl.sum(mine.to(tl.float64), axis=0)
        chosen = tl.minimum(tl.sum((ends <= target).to(tl.int32), axis=0), SPLITS - 1)
        before = tl.sum(
            tl.where(part == chosen, ends - mine.to(tl.float64), 0.0), axis=0
        )
        index = chosen * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(row + index, mask=index < vocab, other=0.0)
        if has_rest:
            weight = _without(weight, index, rejected + q * K, K)
        sums = tl.cumsum(weight.to(tl.float64), axis=0)
        # The two sums of a split differ by rounding. The bounds keep the target between
        # the first and the last id with a weight.
        target = tl.maximum(target - before, 0.0)
        target = tl.minimum(target, tl.max(sums, axis=0) * (1.0 - 2.0**-53))
        within = tl.sum((sums <= target).to(tl.int32), axis=0)
        bonus = tl.minimum(chosen * BLOCK + within, vocab - 1)
        tl.store(predict + place, bonus.to(tl.int64))


@triton.jit
def _without(weight, index, rejected, K: tl.constexpr):
    """Return `weight` with 0 at the rejected ids."""
    for j in range(K):
        weight = tl.where(index == tl.load(rejected + j), 0.0, weight)
    return weight


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
    """See `op.py`."""
    op = "verify_tree_target_only"
    rows, nodes = tree.tokens.shape
    steps = require_result(op, tree, result)
    topk = result.rejected.shape[1]
    require(op, rows * topk, torch.int64, rejected=result.rejected)
    require(op, rows, torch.int64, keys=keys)
    require(op, rows * nodes, torch.float32, totals=totals)
    vocab = target_probs.shape[1]
    if target_probs.dtype is not torch.float32 or target_probs.stride(1) != 1:
        raise ValueError(
            f"{op}: target_probs is {target_probs.dtype} with strides "
            f"{list(target_probs.stride())}; expected float32 with contiguous rows"
        )
    if rows == 0:
        return
    options = launch_options(target_probs.device)
    walk_kernel[(rows,)](
        tree.tokens,
        tree.parent_index,
        tree.positions,
        target_probs,
        totals,
        keys,
        result.predict,
        result.accept_index,
        result.accept_lens,
        result.rejected,
        vocab,
        target_probs.stride(0),
        SINGLE=threshold_single,
        ACCUMULATED=threshold_acc,
        WALK=make_walk(nodes=nodes, steps=steps, topk=topk),
        num_warps=1,
        **options,
    )
    block = split_size(rows, vocab)
    splits = triton.cdiv(vocab, block)
    partials, counters = _SCRATCH.get(
        target_probs.device, partial_bytes=rows * splits * 8, counters=rows
    )
    bonus_kernel[(splits, rows)](
        tree.positions,
        target_probs,
        keys,
        result.predict,
        result.accept_index,
        result.accept_lens,
        result.rejected,
        partials.view(torch.float32),
        counters,
        vocab,
        target_probs.stride(0),
        PATH=steps + 1,
        K=topk,
        SPLITS=splits,
        SPLITS_BLOCK=block_of(splits),
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
        **options,
    )
