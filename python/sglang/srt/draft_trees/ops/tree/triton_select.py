"""Triton kernel that chooses which draft branches go on: a program per request.

`op.py` describes the semantics and has the oracle.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.draft_trees.ops.tree.triton_scores import (
    NO_KEY,
    NOTHING,
    index_of_key,
    key_with_index,
    score_key,
)
from sglang.srt.utils.triton_launch import (
    block_of,
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.draft_trees.buffers import DraftLevels


@triton.jit(do_not_specialize=["parents_at", "hot_size"])
def select_kernel(
    topk_p,
    topk_index,
    hot_token_id,
    hot_size,
    scores,
    tokens,
    parents,
    beam_scores,
    input_ids,
    hidden_rows,
    scores_at,
    parents_at,
    CANDIDATES: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    HAS_HOT: tl.constexpr,
    PDL: tl.constexpr,
):
    q = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    size: tl.constexpr = K if IS_FIRST else K * K
    at = tl.arange(0, BLOCK)
    inside = at < size
    score = tl.load(topk_p + q * size + at, mask=inside, other=0.0)
    token = tl.load(topk_index + q * size + at, mask=inside, other=0)
    if HAS_HOT:
        # Padding rows may hold anything.
        known = inside & (token >= 0) & (token < hot_size)
        token = tl.load(hot_token_id + token, mask=known, other=0)
    if not IS_FIRST:
        score *= tl.load(beam_scores + q * K + at // K, mask=inside, other=0.0)
    first = q.to(tl.int64) * CANDIDATES + scores_at
    tl.store(scores + first + at, score, mask=inside)
    tl.store(tokens + first + at, token, mask=inside)
    if IS_FIRST:
        tl.store(beam_scores + q * K + at, score, mask=inside)
        tl.store(input_ids + q * K + at, token, mask=inside)
        own = tl.zeros([BLOCK], dtype=tl.int64) + q
        tl.store(hidden_rows + q * K + at, own, mask=inside)
        tl.store(parents + q * GROUPS, -1)
        if HAS_NEXT:
            tl.store(parents + q * GROUPS + 1 + at, at.to(tl.int64), mask=inside)
    else:
        # Every thread has read the beam before any thread writes it.
        tl.debug_barrier()
        key = tl.where(inside, score_key(score), NO_KEY)
        key = key_with_index(key, at)
        for j in range(K):
            best = tl.max(key, axis=0)
            chosen = index_of_key(best)
            is_chosen = at == chosen
            out = q * K + j
            tl.store(beam_scores + out, tl.sum(tl.where(is_chosen, score, 0.0), axis=0))
            tl.store(input_ids + out, tl.sum(tl.where(is_chosen, token, 0), axis=0))
            tl.store(hidden_rows + out, (q * K + chosen // K).to(tl.int64))
            if HAS_NEXT:
                tl.store(
                    parents + q * GROUPS + parents_at + j,
                    (scores_at + chosen).to(tl.int64),
                )
            key = tl.where(is_chosen, NOTHING, key)


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
    """See `op.py`."""
    k, rows = shape.topk, levels.scores.shape[0]
    size = k if level == 0 else k * k
    op = "select_top_k"
    require(op, rows * size, torch.float32, topk_p=topk_p)
    require(op, rows * size, torch.int64, topk_index=topk_index)
    require(op, rows * k, torch.int64, input_ids=input_ids, hidden_rows=hidden_rows)
    require_levels(op, levels, shape)
    if rows == 0:
        return
    select_kernel[(rows,)](
        topk_p,
        topk_index,
        topk_index if hot_token_id is None else hot_token_id,
        0 if hot_token_id is None else hot_token_id.numel(),
        levels.scores,
        levels.tokens,
        levels.parents,
        levels.beam_scores,
        input_ids,
        hidden_rows,
        0 if level == 0 else k + k * k * (level - 1),
        1 + k * level,
        CANDIDATES=shape.num_candidates,
        GROUPS=shape.num_groups,
        K=k,
        BLOCK=block_of(size),
        IS_FIRST=level == 0,
        HAS_NEXT=level < shape.num_steps - 1,
        HAS_HOT=hot_token_id is not None,
        num_warps=1 if size <= 64 else 4,
        **launch_options(topk_p.device),
    )


def require_levels(op: str, levels: DraftLevels, shape: TreeShape) -> None:
    """Raise ValueError unless `levels` has the layout that the kernels index."""
    rows = levels.scores.shape[0]
    flat = rows * shape.num_candidates
    require(op, flat, torch.float32, scores=levels.scores)
    require(op, flat, torch.int64, tokens=levels.tokens)
    require(op, rows * shape.num_groups, torch.int64, parents=levels.parents)
    beam = levels.beam_scores
    require(op, rows * shape.topk, torch.float32, beam_scores=beam)
