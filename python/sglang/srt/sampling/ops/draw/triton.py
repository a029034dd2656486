"""Triton kernel that draws a token per row from weights, in one launch.

Programs add up splits of a row in float64, and the last one to arrive finds the split
and then the id. Knows nothing of logits and filters.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.sampling.ops.triton_draw import (
    MAX_SPLITS,
    find_split,
    find_within,
    split_rows,
)
from sglang.srt.sampling.ops.triton_noise import uniform
from sglang.srt.utils.triton_launch import (
    Scratch,
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

_MAX_ROWS = 4096
_SCRATCH = Scratch(partial_bytes=_MAX_ROWS * MAX_SPLITS * 8, counters=_MAX_ROWS)


# Rows of a matrix with one column per request may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["seeds", "positions"])
def draw_kernel(
    weights,
    seeds,
    positions,
    out,
    sums,
    counters,
    vocab,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row_weights = weights + row.to(tl.int64) * vocab
    index = split * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(row_weights + index, mask=index < vocab, other=0.0)
    tl.store(sums + row * SPLITS + split, tl.sum(weight.to(tl.float64), axis=0))
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        tl.store(counters + row, 0)
        splits = tl.arange(0, SPLITS_BLOCK)
        of_splits = tl.load(
            sums + row * SPLITS + splits,
            mask=splits < SPLITS,
            other=0.0,
            cache_modifier=".cg",
        )
        noise = uniform(tl.load(seeds + row), tl.load(positions + row))
        chosen, rest = find_split(of_splits, noise, SPLITS)
        index = chosen * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(row_weights + index, mask=index < vocab, other=0.0)
        within = find_within(weight.to(tl.float64), rest)
        tl.store(out + row, tl.minimum(chosen * BLOCK + within, vocab - 1))


def draw(weights: Tensor, *, seeds: Tensor, positions: Tensor) -> Tensor:
    """`sampling.ops.draw` in one launch for up to 4,096 rows.

    Sums are float64 throughout; those of the reference are float32 within blocks. So
    noise very close to an id's end may draw its neighbour (ADR 37).

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or there are more ids
            than the kernel's scratch can hold.
    """
    rows, vocab = weights.shape
    require("draw", rows * vocab, torch.float32, weights=weights)
    require("draw", rows, torch.int64, seeds=seeds, positions=positions)
    out = torch.empty(rows, dtype=torch.int64, device=weights.device)
    if rows == 0:
        return out
    if rows > _MAX_ROWS:  # nodes of many large trees
        parts = (x.split(_MAX_ROWS) for x in (weights, seeds, positions))
        drawn = [draw(w, seeds=s, positions=p) for w, s, p in zip(*parts, strict=True)]
        return torch.cat(drawn)
    block, splits = split_rows("draw", rows, vocab, most_rows=_MAX_ROWS)
    partial, counters = _SCRATCH.get(
        weights.device, partial_bytes=rows * splits * 8, counters=rows
    )
    draw_kernel[(splits, rows)](
        weights,
        seeds,
        positions,
        out,
        partial.view(torch.float64),
        counters,
        vocab,
        SPLITS=splits,
        SPLITS_BLOCK=triton.next_power_of_2(splits),
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
        **launch_options(weights.device),
    )
    return out
