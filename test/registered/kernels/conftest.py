"""Fixtures of the CPU kernels' tests: SIMD levels, and one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine a second thread stalls every call for milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each SIMD level that the processor has, in use; by name."""
    from sglang_kernels import ops

    try:
        ops.set_simd_level(request.param)
    except RuntimeError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    ops.set_simd_level("auto")
