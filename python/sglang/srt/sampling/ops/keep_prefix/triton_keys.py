"""Keys and masses of probabilities inside Triton kernels, and the search of a key by
quarters.

The bits of a probability, read as an integer, order like it: they are its key. Its mass
is an int64, so that sums do not depend on their order (ADR 37).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

ABOVE_ONE = tl.constexpr(0x3F800001)
"""The key after that of 1.0."""
QUARTER = tl.constexpr(1 << 28)
"""A quarter of the keys' range."""
ID_QUARTER = tl.constexpr(1 << 18)
"""A quarter of the ids that a row may have: `MAX_SPLITS` * `MAX_BLOCK`."""
UNIT = tl.constexpr(2.0**62)
"""A probability of 1 as a mass. Those from 2**-39 are whole numbers of this unit."""
NEVER = tl.constexpr(0x7000000000000000)
"""More than the mass of any row."""


@triton.jit
def keys_of(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def masses_of(keys):
    return (keys.to(tl.float32, bitcast=True) * UNIT).to(tl.int64)


@triton.jit
def load_block(row_probs, start, vocab, BLOCK: tl.constexpr):
    index = start + tl.arange(0, BLOCK)
    return tl.load(row_probs + index, mask=index < vocab, other=0.0)


@triton.jit
def n_true(first, second, third):
    return first.to(tl.int32) + second.to(tl.int32) + third.to(tl.int32)


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def below(keys, weights, begin, step):
    """Return whether keys are below begin + 1, 2 and 3 steps, and the weights of those
    that are, to be added up.

    In one reduction: its meetings of the warps take longer than its sums.
    """
    first = keys < begin + step
    second = keys < begin + 2 * step
    third = keys < begin + 3 * step
    zero = tl.zeros_like(weights)
    return (
        first.to(tl.int32),
        second.to(tl.int32),
        third.to(tl.int32),
        tl.where(first, weights, zero),
        tl.where(second, weights, zero),
        tl.where(third, weights, zero),
    )
