"""Lets KV pools of tests allocate memory when it is written instead of all at start.

A test writes a few hundred of an engine's 16,384 slots, and clearing all of them is
half of the engine's start or more.
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any

import torch

MODULE = "sglang.srt.mem_cache.memory_pool"


def take_memory_when_written() -> None:
    """Enable this for CPU pools in this process, if their module is imported."""
    memory_pool: Any = sys.modules.get(MODULE)
    if memory_pool is not None:
        memory_pool.host_zeros = lazy_zeros


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, as `host_zeros` returns them."""
    size = math.prod(shape) * dtype.itemsize
    if size < mmap.PAGESIZE:
        return torch.zeros(shape, dtype=dtype)
    # The tensor keeps the mapping alive.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, size, flags=private), dtype=dtype).view(shape)
