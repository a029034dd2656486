"""Triton kernel that chooses a token per row without waiting for the device.

One launch reads the logits once: argmax for greedy rows, and for the others an
inverse-CDF draw in the order of the ids with the (seed, position) noise of
`sampling/ops/noise.py`. Knows nothing of top-k, top-p and min-p.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.sampling.ops.row_ops import require_together
from sglang.srt.sampling.ops.triton_draw import (
    MAX_ROWS,
    MAX_SPLITS,
    find_split,
    find_within,
    split_rows,
)
from sglang.srt.sampling.ops.triton_noise import uniform
from sglang.srt.utils.triton_launch import (
    Scratch,
    let_next_start,
    supports_dependent_launch,
    wait_for_inputs,
)

# Per row and split: the best (key, id) and the largest logit and sum of exponentials.
_SCRATCH = Scratch(
    partial_bytes=MAX_ROWS * MAX_SPLITS * 16,
    counters=MAX_ROWS,
)

_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _best(value, index, inside):
    """Return an int64 that grows with the largest value and, among equals, falls with
    its index.

    NaN ranks above everything. Entries not `inside` rank below everything, even -inf.
    """
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(value != value, 0x7FFFFFFF, key)
    key = tl.where(inside, key, -0x80000000)
    # Two reductions of 32 bits are faster than one of 64.
    largest = tl.max(key, axis=0)
    first = tl.min(tl.where(key == largest, index, 0x7FFFFFFF), axis=0)
    return (largest.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)


# Rows of a matrix with one column per request may begin anywhere.
@triton.jit(
    do_not_specialize_on_alignment=[
        "temperatures",
        "seeds",
        "positions",
        "greedy_rows",
    ]
)
def choose_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    greedy_rows,
    out,
    best_keys,
    maxima,
    sums,
    counters,
    vocab,
    row_stride,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row_logits = logits + row.to(tl.int64) * row_stride
    index = split * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(row_logits + index, mask=index < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    slot = row * SPLITS + split
    draws = False
    if not ALL_GREEDY:
        draws = tl.load(greedy_rows + row) == 0
    if draws:
        if HAS_TEMPERATURE:
            value = value / tl.load(temperatures + row)
        largest = tl.max(value, axis=0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(maxima + slot, largest)
        tl.store(sums + slot, tl.sum(tl.exp(value - base), axis=0))
    else:
        tl.store(best_keys + slot, _best(value, index, index < vocab))
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        tl.store(counters + row, 0)
        splits = tl.arange(0, SPLITS_BLOCK)
        slots = row * SPLITS + splits
        if draws:
            chosen = _draw(
                row_logits,
                temperatures + row,
                uniform(tl.load(seeds + row), tl.load(positions + row)),
                maxima + slots,
                sums + slots,
                splits,
                vocab,
                SPLITS,
                BLOCK,
                HAS_TEMPERATURE,
            )
        else:
            keys = tl.load(
                best_keys + slots,
                mask=splits < SPLITS,
                other=_LOWEST,
                cache_modifier=".cg",
            )
            chosen = 0x7FFFFFFF - (tl.max(keys, axis=0) & 0x7FFFFFFF)
        tl.store(out + row, chosen)


@triton.jit
def _draw(
    row_logits,
    temperature,
    noise,
    maxima,
    sums,
    splits,
    vocab,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Return the first id whose cumulative weight exceeds `noise` times the row's
    total."""
    inside = splits < SPLITS
    largest = tl.load(maxima, mask=inside, other=float("-inf"), cache_modifier=".cg")
    weight = tl.load(sums, mask=inside, other=0.0, cache_modifier=".cg")
    top = tl.max(largest, axis=0)
    # A split without any allowed id has maximum -inf and weight 0.
    weight = (weight * tl.exp(largest - top)).to(tl.float64)
    split, rest = find_split(weight, noise, SPLITS)
    index = split * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(row_logits + index, mask=index < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    if HAS_TEMPERATURE:
        value = value / tl.load(temperature)
    within = find_within(tl.exp(value - top).to(tl.float64), rest)
    return tl.minimum(split * BLOCK + within, vocab - 1).to(tl.int64)


def choose_tokens(
    logits: Tensor,
    *,
    temperatures: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    greedy_rows: Tensor | None = None,
) -> Tensor:
    """`sampling.ops.choose_tokens` in one launch.

    Raises:
        ValueError: as in the reference, or the logits have more rows or ids than the
            kernel's scratch can hold.
    """
    rows, vocab = logits.shape
    require_together(seeds, positions, greedy_rows)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    block, splits = split_rows("choose_tokens", rows, vocab)
    partial, counters = _SCRATCH.get(
        logits.device, partial_bytes=rows * splits * 16, counters=rows
    )
    third = MAX_ROWS * MAX_SPLITS
    best_keys = partial[: 8 * third].view(torch.int64)
    maxima = partial[8 * third : 12 * third].view(torch.float32)
    sums = partial[12 * third :].view(torch.float32)
    pdl = supports_dependent_launch(logits.device)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    # Absent tensors are replaced by any pointer; it is never read.
    choose_kernel[(splits, rows)](
        logits,
        maxima if temperatures is None else temperatures,
        out if seeds is None else seeds,
        out if positions is None else positions,
        counters if greedy_rows is None else greedy_rows.view(torch.uint8),
        out,
        best_keys,
        maxima,
        sums,
        counters,
        vocab,
        logits.stride(0),
        SPLITS=splits,
        SPLITS_BLOCK=triton.next_power_of_2(splits),
        BLOCK=block,
        ALL_GREEDY=seeds is None,
        HAS_TEMPERATURE=temperatures is not None,
        PDL=pdl,
        num_warps=8 if block >= 4096 else 4,
        **options,
    )
    return out
