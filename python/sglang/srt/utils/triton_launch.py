"""Dependent launch, block sizes and checks, shared by all Triton launches.

Kernels start while the previous kernel is still running (programmatic dependent
launch): each immediately tells the device that the next one may start, and touches
nothing that another kernel writes before `wait_for_inputs`. Knows nothing about ops.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200, for which tiles are chosen; no device is
queried.
"""
_HOPPER = 9


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel to be launched once every program has reached this call."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all kernels before this one are done. Every program must call this
    before it reads what they write and before it writes anything.
    """
    if PDL:
        gdc_wait()


def supports_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` may be launched with `launch_pdl`."""
    return _dependent and is_hopper_or_later(device)


def is_hopper_or_later(device: torch.device) -> bool:
    """Whether `device` has dependent launch and a copy engine that reads tensor
    descriptors.
    """
    return device.type == "cuda" and compute_capability(device.index or 0)[0] >= _HOPPER


_dependent = True


@contextmanager
def without_dependent_launch() -> Iterator[None]:
    """Scope in which every kernel waits for the previous one, for tests and
    benchmarks.
    """
    global _dependent
    before = _dependent
    _dependent = False
    try:
        yield
    finally:
        _dependent = before


@functools.cache
def compute_capability(index: int) -> tuple[int, int]:
    """Return (major, minor) of the CUDA device with this index."""
    return torch.cuda.get_device_capability(index)


class Scratch:
    """Device memory shared by the programs of one launch: partial results, and counters
    that each launch leaves at zero.

    Both are allocated once per device, because captured graphs may hold their
    addresses; so launches that use them must be ordered by one stream.
    """

    def __init__(self, *, partial_bytes: int, counters: int) -> None:
        self._partial_bytes = partial_bytes
        self._n_counters = counters
        self._buffers: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def get(
        self, device: torch.device, *, partial_bytes: int, counters: int
    ) -> tuple[Tensor, Tensor]:
        """Return (partials uint8, counters int32, all zero) with at least the requested
        sizes.

        Raises:
            RuntimeError: the first use on this device is inside a graph capture.
            ValueError: more is requested than exists.
        """
        if partial_bytes > self._partial_bytes or counters > self._n_counters:
            raise ValueError(
                f"scratch of {partial_bytes} bytes and {counters} counters asked for; "
                f"at most {self._partial_bytes} and {self._n_counters} exist"
            )
        found = self._buffers.get(device)
        if found is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "kernel scratch would be allocated inside a graph capture; "
                    "run the captured function once before the capture"
                )
            found = (
                torch.empty(self._partial_bytes, dtype=torch.uint8, device=device),
                torch.zeros(self._n_counters, dtype=torch.int32, device=device),
            )
            self._buffers[device] = found
        return found


def launch_options(device: torch.device) -> dict[str, Any]:
    """Return launch arguments that let a kernel start before its predecessor ends, if
    supported.
    """
    if supports_dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def require(op: str, size: int, dtype: torch.dtype, **tensors: Tensor) -> None:
    """Check tensors for kernels that index raw memory and would misread another layout.

    Raises:
        ValueError: a tensor is not contiguous or does not have `size` elements of
            `dtype`.
    """
    for name, t in tensors.items():
        if t.dtype is not dtype or t.numel() != size or not t.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {t.dtype} {list(t.shape)} with strides "
                f"{list(t.stride())}; expected {size} contiguous elements of {dtype}"
            )


def rows_for_copies(matrix: Tensor) -> Tensor:
    """Return `matrix`, or a copy if the copy engine cannot address its rows: they must
    be contiguous and start at multiples of 16 bytes. The matrix is half precision, with
    a multiple of 8 elements per row.
    """
    if matrix.stride(1) == 1 and not (matrix.stride(0) % 8 or matrix.data_ptr() % 16):
        return matrix
    # Not `contiguous`, which does not move rows that only start at other addresses.
    return matrix.clone(memory_format=torch.contiguous_format)


def block_of(size: int, *, least: int = 1) -> int:
    """Return the power of two that holds `size` elements."""
    return int(max(triton.next_power_of_2(max(size, 1)), least))
