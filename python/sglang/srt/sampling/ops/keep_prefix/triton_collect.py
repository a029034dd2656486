"""Counts what is above the guessed keys, and collects what is between them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.sampling.ops.keep_prefix.triton_keys import (
    keys_of,
    load_block,
    masses_of,
)
from sglang.srt.sampling.ops.triton_draw import row_of
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs

COLUMNS = tl.constexpr(5)
"""What a program counts: ids and mass from `high`, those in [low, high), and the
largest probability's key."""


@triton.jit
def _unite(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, tl.maximum(a4, b4)


@triton.jit
def collect_kernel(
    probs,
    rows,
    bounds,
    counted,
    candidates,
    vocab,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write what each of a row's SPLITS programs counts, and the candidates in any
    order: their keys, and after CANDIDATES of these their ids."""
    split = tl.program_id(0)
    program = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    low = tl.load(bounds + program * 4)
    high = tl.load(bounds + program * 4 + 1)
    if (low > 0) | (HAS_MIN_P & (low == 0)):
        row_probs = probs + row_of(rows, program) * vocab
        keys = keys_of(load_block(row_probs, split * BLOCK, vocab, BLOCK))
        masses = masses_of(keys)
        is_above = keys >= high
        is_within = (keys >= low) & (keys < high)
        n_above, m_above, n_within, m_within, largest = tl.reduce(
            (
                is_above.to(tl.int32),
                tl.where(is_above, masses, 0),
                is_within.to(tl.int32),
                tl.where(is_within, masses, 0),
                keys,
            ),
            0,
            _unite,
        )
        own = counted + (program * SPLITS + split) * COLUMNS
        tl.store(own, n_above.to(tl.int64))
        tl.store(own + 1, m_above)
        tl.store(own + 2, n_within.to(tl.int64))
        tl.store(own + 3, m_within)
        tl.store(own + 4, largest.to(tl.int64))
        if n_within > 0:
            start = tl.atomic_add(bounds + program * 4 + 2, n_within, sem="relaxed")
            place = start + tl.cumsum(is_within.to(tl.int32), axis=0) - 1
            is_kept = is_within & (place < CANDIDATES)
            found = candidates + program.to(tl.int64) * (2 * CANDIDATES) + place
            tl.store(found, keys, mask=is_kept)
            index = split * BLOCK + tl.arange(0, BLOCK)
            tl.store(found + CANDIDATES, index, mask=is_kept)
