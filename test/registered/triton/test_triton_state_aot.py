"""The kernels of recurrent state compile for the H200 without one being there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from sglang.test.ahead_of_time import compile_in_a_process
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=30, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

PROGRAM = Path(__file__).with_name("state_aot_programs.py")


def test_kernels_of_state_compile_for_sm_90() -> None:
    assert "compiled" in compile_in_a_process([str(PROGRAM)])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
