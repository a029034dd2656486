"""The noise of `sampling/ops/noise.py` inside Triton kernels, bit for bit."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MUL_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MUL_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def uniform(key, position):
    """The float64 in [0, 1) that `noise.uniform` gives for (key, position)."""
    word = key.to(tl.uint64, bitcast=True)
    word += (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN
    word = (word ^ (word >> 30)) * _MUL_1
    word = (word ^ (word >> 27)) * _MUL_2
    word = word ^ (word >> 31)
    return (word >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
