"""Native form of the norm."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_kernels import ops


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops.rmsnorm(x, weight, eps, out)
    return out
