"""How values become stored KV: dtypes of 8 bits, and their scales.

A stored value is value / scale, rounded. Scales belong to a layer and are numbers on
the host, so kernels take them as arguments and a graph holds them. Knows no pools.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Values of --kv-cache-dtype besides the compute type."""


def kv_dtype_name(dtype: torch.dtype) -> str:
    """Return the value of --kv-cache-dtype for a dtype of 8 bits."""
    return next(name for name, known in KV_DTYPES.items() if known == dtype)


class KVScales(NamedTuple):
    """What K and V of a layer are divided by before they are stored."""

    k: float = 1.0
    v: float = 1.0


ONES = KVScales()


def to_stored(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return values as a pool of `dtype` stores them.

    Values beyond the largest of 8 bits become that; NaN stays NaN. Values already of
    the dtype are kept, and need no scale.
    """
    if values.dtype == dtype:
        return values
    most = torch.finfo(dtype).max
    return (values.float() / scale).clamp(-most, most).to(dtype)
