"""Order of scores, launch options and checks, shared by the tree and slot kernels."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.layers.triton_ops.launch import supports_dependent_launch

NO_KEY = tl.constexpr(-0x80000000)
"""Below the key of every score."""
NOTHING = tl.constexpr(-(2**63))
"""Below the key of every score and index."""


@triton.jit
def score_key(score):
    """int32 that grows with the score; NaN as minus infinity, -0 as 0."""
    score = tl.where(score != score, float("-inf"), score) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_score(key):
    """The score whose key is `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_with_index(key, index):
    """int64 that grows with the key and, among equal keys, falls with the index."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of_key(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch that may start before its predecessor ends, if it may."""
    if supports_dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def require(op: str, size: int, dtype: torch.dtype, **tensors: Tensor) -> None:
    """For kernels that index raw memory, where another layout would be misread.

    Raises:
        ValueError: a tensor is not contiguous, or not `size` elements of `dtype`.
    """
    for name, t in tensors.items():
        if t.dtype is not dtype or t.numel() != size or not t.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {t.dtype} {list(t.shape)} with strides "
                f"{list(t.stride())}; expected {size} contiguous elements of {dtype}"
            )


def block_of(size: int, *, least: int = 1) -> int:
    """The power of two that holds `size` elements."""
    return int(max(triton.next_power_of_2(max(size, 1)), least))
