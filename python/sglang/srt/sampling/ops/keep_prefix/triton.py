"""Triton kernel that finds where top-k, top-p and min-p cut, without a sort.

One program per row. The bits of a probability, read as an integer, order like it: they
are its key. A sample of the row says between which two keys the cut should lie. One
pass over the row counts what is above them and collects what is between them, and a
bisection of those few finds the cut:

```
 key  | 0 .............. low | candidates | high ............. 1.0 |
      | below the cut        | bisected   | count and mass, summed |
```

If the sample misled, another pass follows over what is left. Masses are sums of 64-bit
integers, so they depend neither on their order nor on the sample (ADR 37). Knows
nothing of logits and draws.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.sampling.ops.keep_prefix.op import keep_prefix_ref
from sglang.srt.utils.triton_launch import require

_FEW_ROWS = 4
"""A row is one program. With fewer the sort, which uses the whole device, is faster: at
one row 0.11 ms for 0.15 to 0.21 (H100, 128,256 ids)."""
_BLOCK = 4096
"""Ids that a program counts at once."""
_WIDE_BLOCK = 16384
"""Ids that a program only compares at once."""
_CANDIDATES = 8192
"""Ids between the two keys at most."""
_SAMPLE = 4096
"""Ids that are looked at first."""
_WARPS = 16

_PADDING = tl.constexpr(32)
"""Words after a row's candidates, of which the first counts them."""
_RUN = tl.constexpr(8)
"""Neighbours in the sample: a sector of memory, which is read whole anyway."""
_ABOVE_ONE = tl.constexpr(0x3F800001)
"""The key after that of 1.0."""
_QUARTER = tl.constexpr(1 << 28)
"""A quarter of the keys' range."""
_GUESS_STEPS = tl.constexpr(10)
"""Quarterings after which a guess is within 2**-13 of its value."""
_UNIT = tl.constexpr(2.0**62)
"""A probability of 1 as a mass. Those from 2**-39 are whole numbers of this unit."""
_NEVER = tl.constexpr(0x7000000000000000)
"""More than the mass of any row."""


@triton.jit
def _keys(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _masses(keys):
    return (keys.to(tl.float32, bitcast=True) * _UNIT).to(tl.int64)


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def _n_true(first, second, third):
    return first.to(tl.int32) + second.to(tl.int32) + third.to(tl.int32)


@triton.jit
def _below(keys, weights, begin, step):
    """Count the keys below begin + 1, 2 and 3 steps, and add up their weights.

    One reduction for all six: its meetings of the warps take longer than its sums.
    """
    first = keys < begin + step
    second = keys < begin + 2 * step
    third = keys < begin + 3 * step
    zero = tl.zeros_like(weights)
    return tl.reduce(
        (
            first.to(tl.int32),
            second.to(tl.int32),
            third.to(tl.int32),
            tl.where(first, weights, zero),
            tl.where(second, weights, zero),
            tl.where(third, weights, zero),
        ),
        0,
        _add6,
    )


@triton.jit
def _ranks(keys, n_low, n_high):
    """Return (low, high): about the largest key from which on there are `n_low` of
    `keys`, at most that, and about the smallest from which on there are fewer than
    `n_high`, at least that."""
    low = 0
    high = 0
    step = _QUARTER
    for _ in range(_GUESS_STEPS):
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
            _add6,
        )
        low += step * _n_true(n0 >= n_low, n1 >= n_low, n2 >= n_low)
        high += step * _n_true(n3 >= n_high, n4 >= n_high, n5 >= n_high)
        step = step // 4
    return low, high + 4 * step


@triton.jit
def _guess(values, scale, k, tail, SAMPLE: tl.constexpr):
    """Return keys (low, high) between which a sample expects the cut: the largest key
    from which on there are k ids, or below which there is at most the mass `tail`.

    Each of `values` [SAMPLE] stands for `scale` ids. The tail has many small values, so
    a sample tells its mass better than that of the prefix.
    """
    keys = _keys(values)
    wanted = k.to(tl.float32) / scale
    tail = tail / scale
    most = SAMPLE - wanted
    cut = 0
    step = _QUARTER
    for _ in range(_GUESS_STEPS):
        n0, n1, n2, m0, m1, m2 = _below(keys, values, cut, step)
        cut += step * _n_true(
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
    return low, tl.where(rank > margin, high, _ABOVE_ONE)


@triton.jit
def _sample(row_probs, vocab, SAMPLE: tl.constexpr):
    """Return values from all over the row."""
    at = tl.arange(0, SAMPLE)
    runs: tl.constexpr = SAMPLE // _RUN
    index = (at // _RUN) * (vocab // _RUN) // runs * _RUN + at % _RUN
    return tl.load(row_probs + index)


@triton.jit
def _block(row_probs, start, vocab, BLOCK: tl.constexpr):
    index = start + tl.arange(0, BLOCK)
    return tl.load(row_probs + index, mask=index < vocab, other=0.0)


@triton.jit
def _part(
    row_probs,
    candidates,
    vocab,
    low,
    high,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Collect the keys in [low, high) as `candidates`, in any order.

    Returns:
        The count and the mass of all keys from `high`, then of those in [low, high).
    """
    collected = candidates + CANDIDATES + tl.zeros((BLOCK,), tl.int32)
    n_above = tl.zeros((BLOCK,), tl.int32)
    m_above = tl.zeros((BLOCK,), tl.int64)
    n_within = tl.zeros((BLOCK,), tl.int32)
    m_within = tl.zeros((BLOCK,), tl.int64)
    # The candidates of the pass before have been read.
    tl.debug_barrier()
    tl.store(candidates + CANDIDATES, 0)
    tl.debug_barrier()
    value = _block(row_probs, 0, vocab, BLOCK)
    for start in range(0, vocab, BLOCK):
        # Under way while this block is counted.
        following = _block(row_probs, start + BLOCK, vocab, BLOCK)
        keys = _keys(value)
        masses = _masses(keys)
        is_above = keys >= high
        is_within = (keys >= low) & (keys < high)
        place = tl.atomic_add(collected, 1, mask=is_within, sem="relaxed", scope="cta")
        tl.store(candidates + place, keys, mask=is_within & (place < CANDIDATES))
        n_above += is_above.to(tl.int32)
        m_above += tl.where(is_above, masses, 0)
        n_within += is_within.to(tl.int32)
        m_within += tl.where(is_within, masses, 0)
        value = following
    tl.debug_barrier()
    return tl.reduce((n_above, m_above, n_within, m_within), 0, _add4)


@triton.jit
def _narrow(
    row_probs,
    candidates,
    vocab,
    k,
    p,
    limit,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Find keys [low, high) of which all candidates, or the only key, are known and the
    cut is one.

    Returns:
        Whether anything is cut, low, high, and what `_part` counted.
    """
    slack = tl.where(p >= 1.0, -1.0, 1.0 - p)
    # The cut is the largest key with enough ids from it on. It lies in [least, end);
    # `n_end` ids are from `end` on, and `n_least` from `least`.
    least = 0
    end = _ABOVE_ONE
    n_least = vocab
    n_end = 0
    low = 1
    high = _ABOVE_ONE
    if vocab > CANDIDATES:
        scale = vocab.to(tl.float32) / SAMPLE
        low, high = _guess(_sample(row_probs, vocab, SAMPLE), scale, k, slack, SAMPLE)
    n_above = 0
    m_above = tl.cast(0, tl.int64)
    n_within = 0
    m_within = tl.cast(0, tl.int64)
    passes = 0
    is_found = False
    # Values that are no probabilities may leave nothing to search.
    while (not is_found) & (end > tl.maximum(least, 1)):
        low = tl.maximum(low, 1)
        high = tl.maximum(high, low + 1)
        n_above, m_above, n_within, m_within = _part(
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
                tail = slack - (1.0 - (m_above + m_within).to(tl.float32) / _UNIT)
                low, high = _guess(values, scale, k - n_above, tail, SAMPLE)
                low = tl.maximum(low, least)
                high = tl.minimum(high, end)
            else:
                third = (end - least) // 3
                low = least + third
                high = low + third
    return is_found, low, high, n_above, m_above, n_within, m_within


@triton.jit
def _bisect(
    candidates,
    low,
    high,
    n_above,
    m_above,
    n_within,
    m_within,
    k,
    limit,
    CANDIDATES: tl.constexpr,
):
    """Return the key of the last kept id, how many ids have it, and how many of these
    stay."""
    at = tl.arange(0, CANDIDATES)
    keys = tl.load(candidates + at, mask=at < n_within, other=0, cache_modifier=".cg")
    masses = _masses(keys)
    n_from = n_above + CANDIDATES
    m_from = m_above + m_within
    step = _QUARTER
    while step >= high - low:
        step = step // 4
    cut = low
    while step > 0:
        n0, n1, n2, m0, m1, m2 = _below(keys, masses, cut, step)
        cut += step * _n_true(
            (n_from - n0 >= k) | (m_from - m0 >= limit),
            (n_from - n1 >= k) | (m_from - m1 >= limit),
            (n_from - n2 >= k) | (m_from - m2 >= limit),
        )
        step = step // 4
    is_larger = keys > cut
    n_larger = n_above + tl.sum(is_larger.to(tl.int32), axis=0)
    m_larger = m_above + tl.sum(tl.where(is_larger, masses, 0), axis=0)
    # More ids may have one key than there is room for.
    n_tied = tl.sum((keys == cut).to(tl.int32), axis=0)
    n_tied = tl.where(high - low == 1, n_within, n_tied)
    each = tl.maximum(_masses(cut), 1)
    by_mass = 1 + (limit - m_larger - 1) // each
    n_stay = tl.minimum(by_mass, (k - n_larger).to(tl.int64)).to(tl.int32)
    return cut, n_tied, n_stay


@triton.jit
def _largest(row_probs, vocab, BLOCK: tl.constexpr):
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        largest = tl.maximum(largest, _block(row_probs, start, vocab, BLOCK))
    return tl.max(largest, axis=0)


@triton.jit
def _zero(row_probs, vocab, cut, n_tied, n_stay, floor, BLOCK: tl.constexpr):
    """Zero what is below the key `cut` or the value `floor`, and of the `n_tied` ids
    with that key all but the first `n_stay`."""
    seen = 0
    # Every thread has read what others now overwrite.
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        value = _block(row_probs, start, vocab, BLOCK)
        keys = _keys(value)
        is_removed = (keys < cut) | (value < floor)
        if n_stay < n_tied:
            is_tied = (keys == cut).to(tl.int32)
            n_here = tl.sum(is_tied, axis=0)
            if seen >= n_stay:
                is_removed = is_removed | (is_tied != 0)
            elif seen + n_here > n_stay:
                rank = seen + tl.cumsum(is_tied, axis=0)
                is_removed = is_removed | ((is_tied != 0) & (rank > n_stay))
            seen += n_here
        index = start + tl.arange(0, BLOCK)
        zeros = tl.zeros_like(value)
        tl.store(row_probs + index, zeros, mask=is_removed & (value > 0.0))


# Rows of a matrix with one column per request may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["top_ks", "top_ps", "min_ps"])
def keep_prefix_kernel(
    probs,
    top_ks,
    top_ps,
    min_ps,
    candidates,
    vocab,
    BLOCK: tl.constexpr,
    WIDE_BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
):
    row = tl.program_id(0)
    row_probs = probs + row.to(tl.int64) * vocab
    first = tl.load(row_probs)
    # A softmax is NaN everywhere or nowhere.
    is_number = first == first
    k = tl.load(top_ks + row).to(tl.int32)
    p = tl.load(top_ps + row)
    cut = 0
    n_tied = 0
    n_stay = 0
    if is_number & ((k < vocab) | (p < 1.0)):
        own = candidates + row.to(tl.int64) * (CANDIDATES + _PADDING)
        limit = tl.where(p >= 1.0, _NEVER, tl.maximum((p * _UNIT).to(tl.int64), 1))
        is_cut, low, high, n_above, m_above, n_within, m_within = _narrow(
            row_probs, own, vocab, k, p, limit, BLOCK, SAMPLE, CANDIDATES
        )
        if is_cut:
            cut, n_tied, n_stay = _bisect(
                own,
                low,
                high,
                n_above,
                m_above,
                n_within,
                m_within,
                k,
                limit,
                CANDIDATES,
            )
    floor = 0.0
    if HAS_MIN_P:
        min_p = tl.load(min_ps + row)
        if is_number & (min_p > 0.0):
            floor = _largest(row_probs, vocab, WIDE_BLOCK) * min_p
    if is_number & ((cut > 0) | (floor > 0.0)):
        _zero(row_probs, vocab, cut, n_tied, n_stay, floor, WIDE_BLOCK)


def keep_prefix(
    probs: Tensor,
    *,
    rows: Tensor | None,
    top_ks: Tensor,
    top_ps: Tensor,
    max_top_k: int,
    min_ps: Tensor | None,
) -> Tensor:
    """`sampling.ops.keep_prefix`, in one launch unless there are few rows.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    form = keep_prefix_ref if len(probs) < _FEW_ROWS else cut_rows
    return form(
        probs,
        rows=rows,
        top_ks=top_ks,
        top_ps=top_ps,
        max_top_k=max_top_k,
        min_ps=min_ps,
    )


def cut_rows(
    probs: Tensor,
    *,
    rows: Tensor | None,
    top_ks: Tensor,
    top_ps: Tensor,
    max_top_k: int,
    min_ps: Tensor | None,
) -> Tensor:
    """`sampling.ops.keep_prefix` in place, in one launch.

    Args: as for the op.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    n_rows, vocab = probs.shape
    require("keep_prefix", n_rows * vocab, torch.float32, probs=probs)
    require("keep_prefix", n_rows, torch.int64, top_ks=top_ks)
    require("keep_prefix", n_rows, torch.float32, top_ps=top_ps)
    if min_ps is not None:
        require("keep_prefix", n_rows, torch.float32, min_ps=min_ps)
    if n_rows == 0 or (rows is None and min_ps is None):
        return probs
    room = min(_CANDIDATES, triton.next_power_of_2(vocab))
    candidates = probs.new_empty(n_rows, room + _PADDING.value, dtype=torch.int32)
    keep_prefix_kernel[(n_rows,)](
        probs,
        top_ks,
        top_ps,
        top_ps if min_ps is None else min_ps,
        candidates,
        vocab,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
        WIDE_BLOCK=min(_WIDE_BLOCK, triton.next_power_of_2(vocab)),
        SAMPLE=_SAMPLE,
        CANDIDATES=room,
        HAS_MIN_P=min_ps is not None,
        num_warps=_WARPS,
    )
    return probs
