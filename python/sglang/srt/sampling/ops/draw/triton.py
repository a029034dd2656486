"""Triton kernel that zeroes what filters remove from probabilities, and draws a token
per row from the rest.

Programs cut and add up splits of a row in float64, and the last one to arrive finds the
split and then the id. Knows nothing of logits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.sampling.ops.keep_prefix.triton import find_cuts, is_removed
from sglang.srt.sampling.ops.row_ops import require_together
from sglang.srt.sampling.ops.triton_draw import (
    MAX_ROWS,
    MAX_SPLITS,
    find_split,
    find_within,
    row_of,
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

if TYPE_CHECKING:
    from sglang.srt.sampling.ops.keep_prefix.op import Filters

_SCRATCH = Scratch(partial_bytes=MAX_ROWS * MAX_SPLITS * 8, counters=MAX_ROWS)


@triton.jit
def _load(row_probs, index, cuts, program, vocab):
    """Return what the filters leave of a split, and what they remove."""
    value = tl.load(row_probs + index, mask=index < vocab, other=0.0)
    removed = index < 0
    if cuts is not None:
        removed = is_removed(value, index, cuts, program) & (value > 0.0)
        value = tl.where(removed, 0.0, value)
    return value, removed


# Rows of a matrix with one column per request may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["seeds", "positions"])
def draw_kernel(
    probs,
    rows,
    cuts,
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
    program = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = row_of(rows, program)
    if row >= 0:
        row_probs = probs + row * vocab
        index = split * BLOCK + tl.arange(0, BLOCK)
        weight, removed = _load(row_probs, index, cuts, program, vocab)
        tl.store(row_probs + index, tl.zeros_like(weight), mask=removed)
        own = sums + program * SPLITS
        tl.store(own + split, tl.sum(weight.to(tl.float64), axis=0))
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + program, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(counters + program, 0)
            splits = tl.arange(0, SPLITS_BLOCK)
            of_splits = tl.load(
                own + splits, mask=splits < SPLITS, other=0.0, cache_modifier=".cg"
            )
            noise = uniform(tl.load(seeds + program), tl.load(positions + row))
            chosen, rest = find_split(of_splits, noise, SPLITS)
            index = chosen * BLOCK + tl.arange(0, BLOCK)
            # Cut again: this split may still be in the cache as it was.
            weight, _ = _load(row_probs, index, cuts, program, vocab)
            within = find_within(weight.to(tl.float64), rest)
            tl.store(out + row, tl.minimum(chosen * BLOCK + within, vocab - 1))


def draw(
    probs: Tensor,
    filters: Filters,
    *,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sampling.ops.draw` in place, in four launches, or one if nothing is filtered.
    It never waits for the device.

    Sums are float64 throughout; those of the reference are float32 within blocks. So
    noise very close to an id's end may draw its neighbour (ADR 37).

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or there are more ids
            than the kernel's scratch can hold.
    """
    n_rows, vocab = probs.shape
    require_together(rows, out)
    if n_rows > MAX_ROWS and rows is None:  # nodes of many large trees
        drawn = [
            draw(
                probs[first : first + MAX_ROWS],
                filters.narrow(first, first + MAX_ROWS),
                seeds=seeds[first : first + MAX_ROWS],
                positions=positions[first : first + MAX_ROWS],
            )[0]
            for first in range(0, n_rows, MAX_ROWS)
        ]
        return torch.cat(drawn), probs
    if out is None:
        out = torch.empty(n_rows, dtype=torch.int64, device=probs.device)
    programs = n_rows if rows is None else len(rows)
    require("draw", probs.numel(), torch.float32, probs=probs)
    require("draw", programs, torch.int64, seeds=seeds)
    require("draw", n_rows, torch.int64, positions=positions, out=out)
    if programs == 0:
        return out, probs
    block, splits = split_rows("draw", min(n_rows, MAX_ROWS), vocab)
    cuts = find_cuts(probs, filters, rows)
    partial, counters = _SCRATCH.get(
        probs.device, partial_bytes=programs * splits * 8, counters=programs
    )
    draw_kernel[(splits, programs)](
        probs,
        rows,
        cuts,
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
        **launch_options(probs.device),
    )
    return out, probs
