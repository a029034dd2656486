"""Triton kernel for a draft step's candidates: top-k of each row, with probabilities.

The vocabulary is split over programs; a row's last program merges their results.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.draft_trees.ops.tree.op import require_topk
from sglang.srt.draft_trees.ops.tree.triton_scores import (
    NO_KEY,
    NOTHING,
    index_of_key,
    key_score,
    key_with_index,
    score_key,
)
from sglang.srt.sampling.ops.triton_draw import split_size
from sglang.srt.utils.triton_launch import (
    Scratch,
    block_of,
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

_SCRATCH = Scratch(partial_bytes=16 << 20, counters=1 << 16)


@triton.jit
def top_k_kernel(
    logits,
    probs,
    ids,
    candidates,
    maxima,
    sums,
    counters,
    vocab,
    row_stride,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    index = split * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    value = tl.load(
        logits + row.to(tl.int64) * row_stride + index,
        mask=inside,
        other=float("-inf"),
    ).to(tl.float32)
    value = tl.where(value != value, float("-inf"), value)
    slot = row * SPLITS + split
    largest = tl.max(value, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(maxima + slot, largest)
    tl.store(sums + slot, tl.sum(tl.exp(value - base), axis=0))
    key = tl.where(inside, score_key(value), NO_KEY)
    for j in range(K):
        # Two reductions of 32 bits are faster than one of 64.
        best = tl.max(key, axis=0)
        first = tl.min(tl.where(key == best, index, 0x7FFFFFFF), axis=0)
        tl.store(candidates + slot * K + j, key_with_index(best, first))
        key = tl.where(index == first, NO_KEY, key)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        tl.store(counters + row, 0)
        part = tl.arange(0, SPLITS_BLOCK)
        slots = row * SPLITS + part
        is_part = part < SPLITS
        tops = tl.load(
            maxima + slots, mask=is_part, other=float("-inf"), cache_modifier=".cg"
        )
        weights = tl.load(sums + slots, mask=is_part, other=0.0, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        total = tl.sum(weights * tl.exp(tops - top), axis=0)
        flat = tl.arange(0, SPLITS_BLOCK * K_BLOCK)
        is_found = (flat // K_BLOCK < SPLITS) & (flat % K_BLOCK < K)
        found = tl.load(
            candidates + (row * SPLITS + flat // K_BLOCK) * K + flat % K_BLOCK,
            mask=is_found,
            other=NOTHING,
            cache_modifier=".cg",
        )
        for j in range(K):
            best = tl.max(found, axis=0)
            tl.store(ids + row * K + j, index_of_key(best).to(tl.int64))
            if K == 1:
                tl.store(probs + row, 1.0)
            else:
                p = tl.exp(key_score((best >> 32).to(tl.int32)) - top) / total
                # Also false for NaN.
                p = tl.where((p >= 0.0) & (p <= 2.0), p, 0.0)
                tl.store(probs + row * K + j, p)
            found = tl.where(found == best, NOTHING, found)


def top_k_probs(logits: Tensor, *, probs: Tensor, ids: Tensor) -> None:
    """See `op.py`."""
    require_topk(logits, ids)
    rows, vocab = logits.shape
    topk = ids.shape[1]
    require("top_k_probs", rows * topk, torch.float32, probs=probs)
    require("top_k_probs", rows * topk, torch.int64, ids=ids)
    if vocab > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"top_k_probs: logits have strides {list(logits.stride())}; "
            "rows must be contiguous"
        )
    if rows == 0:
        return
    block = split_size(rows, vocab)
    splits = triton.cdiv(vocab, block)
    slots = rows * splits
    partial, counters = _SCRATCH.get(
        logits.device, partial_bytes=slots * 8 * (topk + 1), counters=rows
    )
    sums_at = slots * (8 * topk + 4)
    top_k_kernel[(splits, rows)](
        logits,
        probs,
        ids,
        partial[: slots * 8 * topk].view(torch.int64),
        partial[slots * 8 * topk : sums_at].view(torch.float32),
        partial[sums_at : sums_at + slots * 4].view(torch.float32),
        counters,
        vocab,
        logits.stride(0),
        K=topk,
        K_BLOCK=block_of(topk),
        SPLITS=splits,
        SPLITS_BLOCK=block_of(splits),
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
        **launch_options(logits.device),
    )
