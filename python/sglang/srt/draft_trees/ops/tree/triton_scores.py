"""The order of scores, shared by the tree kernels."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-0x80000000)
"""Below the key of every score."""
NOTHING = tl.constexpr(-(2**63))
"""Below the key of every score and index."""


@triton.jit
def score_key(score):
    """Return an int32 that grows with the score; NaN counts as minus infinity, -0 as
    0."""
    score = tl.where(score != score, float("-inf"), score) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_score(key):
    """Return the score whose key is `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_with_index(key, index):
    """Return an int64 that grows with the key and, among equals, falls with the
    index."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of_key(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)
