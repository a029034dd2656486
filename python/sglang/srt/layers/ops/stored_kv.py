"""Device functions of the kernels that store and read KV of 8 bits."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def stored_value(value, target, scale, MOST: tl.constexpr):
    """Return `value` as the tensor `target` stores it: divided by `scale`, within MOST.
    MOST 0 means that it has the dtype already. NaN stays NaN."""
    if MOST == 0:
        return value
    else:
        scaled = value.to(tl.float32) / scale
        scaled = tl.where(scaled > MOST, MOST, scaled)
        scaled = tl.where(scaled < -MOST, -MOST, scaled)
        return scaled.to(target.dtype.element_ty)


@triton.jit
def read_value(stored, dtype):
    """Return stored values as `dtype`, exactly; NaN and infinity stay what they are.

    e5m2 is the upper byte of float16. Triton converts it to bfloat16 by moving bits and
    multiplying by a power of two, which makes numbers like 98304 of NaN and infinity.
    Through float16 it is exact on every device. e4m3 goes through float16 anyway.
    """
    if stored.dtype == tl.float8e5:
        return stored.to(tl.float16).to(dtype)
    else:
        return stored.to(dtype)


def most_stored(values: Tensor, cache: Tensor) -> int:
    """Return MOST of `stored_value` for values that are stored in a cache.

    Raises:
        ValueError: the cache has neither their dtype nor 8 bits.
    """
    if values.dtype == cache.dtype:
        return 0
    if cache.dtype.itemsize != 1:
        raise ValueError(
            f"k is {values.dtype}, the cache {cache.dtype}; pass one dtype, or a cache "
            "of 8 bits"
        )
    return int(torch.finfo(cache.dtype).max)
