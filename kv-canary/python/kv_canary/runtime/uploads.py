"""Copies from the host to a device, in stream order and without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PER_16_BYTES = 2
"""int64 values."""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` to `device`; a tensor that is not on the host comes back as is."""
    if device.type == "cpu" or not values.is_cpu:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def upload_vectors(
    vectors: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, ...]:
    """Copy lists of equal length as int64 vectors [n] in one copy. Each begins at a
    multiple of 16 bytes: Triton compiles a kernel again for pointers that do not."""
    count = len(vectors[0])
    padding = [0] * (count % _PER_16_BYTES)
    return tuple(
        vector[:count]
        for vector in upload_rows([[*each, *padding] for each in vectors], device)
    )


def upload_rows(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Upload lists of equal length as one int64 tensor [len(values), n]."""
    return upload(torch.tensor(values, dtype=torch.int64), device)
