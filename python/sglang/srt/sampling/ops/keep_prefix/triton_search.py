"""Finds a row's cut among the candidates; passes over the row again only if the guess
was wrong."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sglang.srt.sampling.ops.keep_prefix.triton_collect import COLUMNS
from sglang.srt.sampling.ops.keep_prefix.triton_guess import guess
from sglang.srt.sampling.ops.keep_prefix.triton_keys import (
    ABOVE_ONE,
    ID_QUARTER,
    NEVER,
    UNIT,
    add3,
    add4,
    add6,
    below,
    keys_of,
    load_block,
    masses_of,
    n_true,
)
from sglang.srt.sampling.ops.triton_draw import row_of
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


class Bracket(NamedTuple):
    """Keys [low, high) with the cut between them, the ids and the mass from `high` on,
    and those of the keys themselves."""

    low: Any
    high: Any
    n_above: Any
    m_above: Any
    n_within: Any
    m_within: Any


@triton.jit
def _add6_and_range(
    a0, a1, a2, a3, a4, a5, least_a, most_a, b0, b1, b2, b3, b4, b5, least_b, most_b
):
    s0, s1, s2, s3, s4, s5 = add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5)
    least = tl.minimum(least_a, least_b)
    return s0, s1, s2, s3, s4, s5, least, tl.maximum(most_a, most_b)


@triton.jit
def _recount(
    row_probs,
    candidates,
    vocab,
    low,
    high,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Do what `collect_kernel` does, with one program for the row.

    Returns:
        The count and the mass of all keys from `high`, then of those in [low, high).
    """
    n_above = tl.zeros((BLOCK,), tl.int32)
    m_above = tl.zeros((BLOCK,), tl.int64)
    m_within = tl.zeros((BLOCK,), tl.int64)
    n_within = 0
    # The candidates of the pass before have been read.
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        keys = keys_of(load_block(row_probs, start, vocab, BLOCK))
        masses = masses_of(keys)
        is_above = keys >= high
        is_within = (keys >= low) & (keys < high)
        place = n_within + tl.cumsum(is_within.to(tl.int32), axis=0) - 1
        is_kept = is_within & (place < CANDIDATES)
        tl.store(candidates + place, keys, mask=is_kept)
        index = start + tl.arange(0, BLOCK)
        tl.store(candidates + CANDIDATES + place, index, mask=is_kept)
        n_above += is_above.to(tl.int32)
        m_above += tl.where(is_above, masses, 0)
        m_within += tl.where(is_within, masses, 0)
        n_within += tl.sum(is_within.to(tl.int32), axis=0)
    tl.debug_barrier()
    n_above, m_above, m_within, _ = tl.reduce(
        (n_above, m_above, m_within, m_within), 0, add4
    )
    return n_above, m_above, n_within, m_within


@triton.jit
def _narrow(
    row_probs,
    candidates,
    vocab,
    k,
    p,
    limit,
    guessed,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Return whether anything is cut, and a bracket of which all candidates, or the
    only key, are known. `guessed`: the first one, which may be wrong."""
    low, high = guessed.low, guessed.high
    n_above, m_above = guessed.n_above, guessed.m_above
    n_within, m_within = guessed.n_within, guessed.m_within
    slack = tl.where(p >= 1.0, -1.0, 1.0 - p)
    # The cut is the largest key with enough ids from it on. It lies in [least, end);
    # `n_end` ids are from `end` on, and `n_least` from `least`.
    least = 0
    end = ABOVE_ONE
    n_least = vocab
    n_end = 0
    passes = 0
    is_found = False
    # Values that are no probabilities may leave nothing to search.
    while (not is_found) & (end > tl.maximum(least, 1)):
        low = tl.maximum(low, 1)
        high = tl.maximum(high, low + 1)
        if passes > 0:
            n_above, m_above, n_within, m_within = _recount(
                row_probs, candidates, vocab, low, high, BLOCK, CANDIDATES
            )
        n_low = n_above + n_within
        from_high = (n_above >= k) | (m_above >= limit)
        from_low = (n_low >= k) | (m_above + m_within >= limit)
        is_between = from_low & (not from_high)
        is_found = is_between & ((n_within <= CANDIDATES) | (high - low == 1))
        least = tl.where(from_high, high, tl.where(from_low, low, least))
        n_least = tl.where(from_high, n_above, tl.where(from_low, n_low, n_least))
        end = tl.where(from_high, end, tl.where(from_low, high, low))
        n_end = tl.where(from_high, n_end, tl.where(from_low, n_above, n_low))
        passes += 1
        if not is_found:
            if n_least - n_end <= CANDIDATES:
                low = least
                high = end
            elif is_between & (passes == 1):
                # The candidates are a larger sample, of where the cut is.
                values = tl.load(
                    candidates + tl.arange(0, SAMPLE), cache_modifier=".cg"
                ).to(tl.float32, bitcast=True)
                scale = n_within.to(tl.float32) / SAMPLE
                tail = slack - (1.0 - (m_above + m_within).to(tl.float32) / UNIT)
                low, high = guess(values, scale, k - n_above, tail, SAMPLE)
                low = tl.maximum(low, least)
                high = tl.minimum(high, end)
            else:
                third = (end - least) // 3
                low = least + third
                high = low + third
    return is_found, Bracket(low, high, n_above, m_above, n_within, m_within)


@triton.jit
def _bisect(keys, masses, low, high, n_from, m_from, k, limit):
    """Return the largest key of [low, high) from which on there are k ids or the mass
    `limit`.

    `keys` holds all of [low, high), and smaller ones as padding. `n_from` counts it
    and the ids from `high` on; `m_from` is the mass from `low` on.
    """
    begin = low
    end = high
    # The cut is one of the keys, so the search also ends where all that are left are
    # equal, as logits of 16 bits often are.
    while end - begin > 1:
        step = (end - begin + 3) // 4
        is_left = (keys >= begin) & (keys < end)
        b0, b1, b2, w0, w1, w2 = below(keys, masses, begin, step)
        smallest = tl.where(is_left, keys, ABOVE_ONE)
        largest = tl.where(is_left, keys, 0)
        n0, n1, n2, m0, m1, m2, least, most = tl.reduce(
            (b0, b1, b2, w0, w1, w2, smallest, largest), 0, _add6_and_range
        )
        begin += step * n_true(
            (n_from - n0 >= k) | (m_from - m0 >= limit),
            (n_from - n1 >= k) | (m_from - m1 >= limit),
            (n_from - n2 >= k) | (m_from - m2 >= limit),
        )
        end = tl.minimum(tl.minimum(begin + step, end), most + 1)
        begin = tl.maximum(begin, least)
    return begin


@triton.jit
def _nth_id(ids, n):
    """Return the n-th smallest of `ids`, which are at least 0 and differ."""
    found = 0
    step = ID_QUARTER
    while step > 0:
        n0, n1, n2 = tl.reduce(
            (
                (ids < found + step).to(tl.int32),
                (ids < found + 2 * step).to(tl.int32),
                (ids < found + 3 * step).to(tl.int32),
            ),
            0,
            add3,
        )
        found += step * n_true(n0 < n, n1 < n, n2 < n)
        step = step // 4
    return found


@triton.jit
def _nth_id_of_row(row_probs, key, n, vocab, BLOCK: tl.constexpr):
    """Return the n-th id of the row with this key."""
    found = vocab
    seen = 0
    for start in range(0, vocab, BLOCK):
        is_tied = (keys_of(load_block(row_probs, start, vocab, BLOCK)) == key).to(
            tl.int32
        )
        n_here = tl.sum(is_tied, axis=0)
        if (seen < n) & (seen + n_here >= n):
            rank = seen + tl.cumsum(is_tied, axis=0)
            index = start + tl.arange(0, BLOCK)
            is_it = (is_tied != 0) & (rank == n)
            found = tl.sum(tl.where(is_it, index, 0), axis=0)
        seen += n_here
    return found


@triton.jit
def _find(
    row_probs,
    candidates,
    vocab,
    bracket,
    k,
    limit,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Return the key and the id of the last kept id, of those that have this key; the
    id is `vocab` if all of these stay. At most WIDTH candidates are looked at."""
    at = tl.arange(0, WIDTH)
    is_there = at < bracket.n_within
    keys = tl.load(candidates + at, mask=is_there, other=0, cache_modifier=".cg")
    masses = masses_of(keys)
    n_from = bracket.n_above + WIDTH
    m_from = bracket.m_above + bracket.m_within
    cut = _bisect(keys, masses, bracket.low, bracket.high, n_from, m_from, k, limit)
    is_larger = keys > cut
    is_tied = keys == cut
    n_larger, m_larger, n_tied, _ = tl.reduce(
        (
            is_larger.to(tl.int32),
            tl.where(is_larger, masses, 0),
            is_tied.to(tl.int32),
            is_tied.to(tl.int32),
        ),
        0,
        add4,
    )
    n_larger += bracket.n_above
    m_larger += bracket.m_above
    # More ids may have one key than there is room for.
    if bracket.high - bracket.low == 1:
        n_tied = bracket.n_within
    each = tl.maximum(masses_of(cut), 1)
    by_mass = 1 + (limit - m_larger - 1) // each
    n_stay = tl.minimum(by_mass, (k - n_larger).to(tl.int64)).to(tl.int32)
    last = vocab
    if n_stay < n_tied:
        if n_tied > WIDTH:
            last = _nth_id_of_row(row_probs, cut, n_stay, vocab, BLOCK)
        else:
            ids = tl.load(
                candidates + CANDIDATES + at,
                mask=is_there & is_tied,
                other=0x7FFFFFFF,
                cache_modifier=".cg",
            )
            last = _nth_id(ids, n_stay)
    return cut, last


@triton.jit
def _column(counted, program, at, SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr):
    split = tl.arange(0, SPLITS_BLOCK)
    own = counted + (program * SPLITS + split) * COLUMNS + at
    return tl.load(own, mask=split < SPLITS, other=0)


# Rows of a matrix with one column per request may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["top_ks", "top_ps", "min_ps"])
def search_kernel(
    probs,
    rows,
    top_ks,
    top_ps,
    min_ps,
    bounds,
    counted,
    candidates,
    cuts,
    vocab,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    FEW: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write each row's `cuts`: the key of the last kept id, that id (`vocab` if all
    with its key stay), and the bits of the smallest probability that min-p keeps."""
    program = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row_probs = probs + row_of(rows, program) * vocab
    low = tl.load(bounds + program * 4)
    high = tl.load(bounds + program * 4 + 1)
    cut = 0
    last = vocab
    if low > 0:
        n_above, m_above, n_within, m_within = tl.reduce(
            (
                _column(counted, program, 0, SPLITS, SPLITS_BLOCK).to(tl.int32),
                _column(counted, program, 1, SPLITS, SPLITS_BLOCK),
                _column(counted, program, 2, SPLITS, SPLITS_BLOCK).to(tl.int32),
                _column(counted, program, 3, SPLITS, SPLITS_BLOCK),
            ),
            0,
            add4,
        )
        own = candidates + program.to(tl.int64) * (2 * CANDIDATES)
        k = tl.load(top_ks + program).to(tl.int32)
        p = tl.load(top_ps + program)
        limit = tl.where(p >= 1.0, NEVER, tl.maximum((p * UNIT).to(tl.int64), 1))
        guessed = Bracket(low, high, n_above, m_above, n_within, m_within)
        is_cut, bracket = _narrow(
            row_probs, own, vocab, k, p, limit, guessed, BLOCK, SAMPLE, CANDIDATES
        )
        if is_cut:
            # Most rows have few candidates, which take half the time.
            if bracket.n_within <= FEW:
                cut, last = _find(
                    row_probs, own, vocab, bracket, k, limit, BLOCK, FEW, CANDIDATES
                )
            else:
                cut, last = _find(
                    row_probs,
                    own,
                    vocab,
                    bracket,
                    k,
                    limit,
                    BLOCK,
                    CANDIDATES,
                    CANDIDATES,
                )
    floor = 0.0
    if HAS_MIN_P:
        min_p = tl.load(min_ps + program)
        first = tl.load(row_probs, mask=low >= 0, other=0.0)
        if (first == first) & (min_p > 0.0) & (low >= 0):
            largest = tl.max(_column(counted, program, 4, SPLITS, SPLITS_BLOCK), axis=0)
            floor = largest.to(tl.int32).to(tl.float32, bitcast=True) * min_p
    tl.store(cuts + program * 4, cut)
    tl.store(cuts + program * 4 + 1, last)
    tl.store(
        cuts + program * 4 + 2, tl.cast(floor, tl.float32).to(tl.int32, bitcast=True)
    )
