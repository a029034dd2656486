"""Guesses where a row's cut lies, from a sample of its probabilities.

A guess decides how long the search takes, never what it finds.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.sampling.ops.keep_prefix.triton_keys import (
    ABOVE_ONE,
    QUARTER,
    add6,
    below,
    keys_of,
    n_true,
)
from sglang.srt.sampling.ops.triton_draw import row_of
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs

RUN = tl.constexpr(8)
"""Neighbours in the sample: a sector of memory, which is read whole anyway."""
STEPS = tl.constexpr(8)
"""Quarterings after which a guess is within 2**-9 of its value."""


@triton.jit
def _ranks(keys, n_low, n_high):
    """Return (low, high): about the largest key from which on there are `n_low` of
    `keys`, at most that, and about the smallest from which on there are fewer than
    `n_high`, at least that."""
    low = 0
    high = 0
    step = QUARTER
    for _ in range(STEPS):
        n0, n1, n2, n3, n4, n5 = tl.reduce(
            (
                (keys >= low + step).to(tl.int32),
                (keys >= low + 2 * step).to(tl.int32),
                (keys >= low + 3 * step).to(tl.int32),
                (keys >= high + step).to(tl.int32),
                (keys >= high + 2 * step).to(tl.int32),
                (keys >= high + 3 * step).to(tl.int32),
            ),
            0,
            add6,
        )
        low += step * n_true(n0 >= n_low, n1 >= n_low, n2 >= n_low)
        high += step * n_true(n3 >= n_high, n4 >= n_high, n5 >= n_high)
        step = step // 4
    return low, high + 4 * step


@triton.jit
def guess(values, scale, k, tail, SAMPLE: tl.constexpr):
    """Return keys (low, high) between which a sample expects the cut: the largest key
    from which on there are k ids, or below which there is at most the mass `tail`.

    Each of `values` [SAMPLE] stands for `scale` ids. The tail has many small values, so
    a sample tells its mass better than that of the prefix.
    """
    keys = keys_of(values)
    wanted = k.to(tl.float32) / scale
    tail = tail / scale
    most = SAMPLE - wanted
    cut = 0
    step = QUARTER
    for _ in range(STEPS):
        n0, n1, n2, m0, m1, m2 = tl.reduce(below(keys, values, cut, step), 0, add6)
        cut += step * n_true(
            (n0.to(tl.float32) <= most) | (m0 <= tail),
            (n1.to(tl.float32) <= most) | (m1 <= tail),
            (n2.to(tl.float32) <= most) | (m2 <= tail),
        )
        step = step // 4
    rank = tl.sum((keys >= cut).to(tl.int32), axis=0)
    # The variance of the rank where a number of ids was wanted, and where a mass was.
    share = rank.to(tl.float32) / SAMPLE
    by_count = SAMPLE * share * (1.0 - share)
    largest = tl.maximum(tl.cast(cut, tl.float32, bitcast=True), 1e-38)
    relative = tl.where(keys < cut, values / largest, 0.0)
    by_mass = tl.sum(relative * relative, axis=0)
    is_count = rank.to(tl.float32) >= wanted
    margin = 8 + (3.5 * tl.sqrt(tl.where(is_count, by_count, by_mass))).to(tl.int32)
    last = tl.minimum(rank + margin, SAMPLE)
    low, high = _ranks(keys, last, rank - margin)
    return low, tl.where(rank > margin, high, ABOVE_ONE)


@triton.jit
def _sample(row_probs, vocab, SAMPLE: tl.constexpr):
    """Return values from all over the row."""
    at = tl.arange(0, SAMPLE)
    runs: tl.constexpr = SAMPLE // RUN
    index = (at // RUN) * (vocab // RUN) // runs * RUN + at % RUN
    return tl.load(row_probs + index)


# Rows of a matrix with one column per request may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["top_ks", "top_ps"])
def guess_kernel(
    probs,
    rows,
    top_ks,
    top_ps,
    bounds,
    vocab,
    SAMPLE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write each program's `bounds`: keys (low, high), both 0 if nothing is to be cut,
    -1 if it has no row, and the number of candidates so far."""
    program = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = row_of(rows, program)
    row_probs = probs + row * vocab
    is_there = row >= 0
    first = tl.load(row_probs, mask=is_there, other=0.0)
    k = tl.load(top_ks + program).to(tl.int32)
    p = tl.load(top_ps + program)
    low = tl.where(is_there, 0, -1)
    high = low
    # A softmax is NaN everywhere or nowhere.
    if is_there & (first == first) & ((k < vocab) | (p < 1.0)):
        low = 1
        high = ABOVE_ONE
        if vocab > CANDIDATES:
            scale = vocab.to(tl.float32) / SAMPLE
            slack = tl.where(p >= 1.0, -1.0, 1.0 - p)
            values = _sample(row_probs, vocab, SAMPLE)
            low, high = guess(values, scale, k, slack, SAMPLE)
            low = tl.maximum(low, 1)
            high = tl.maximum(high, low + 1)
    tl.store(bounds + program * 4, low)
    tl.store(bounds + program * 4 + 1, high)
    tl.store(bounds + program * 4 + 2, 0)
