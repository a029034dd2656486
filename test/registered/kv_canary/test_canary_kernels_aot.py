"""Every variant of the canary's kernels that is shipped compiles for the H200 without
one being there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from sglang.test.ahead_of_time import compile_in_a_process
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="cpu", full_time=230)
register_cuda_ci(est_time=40, suite="cuda")

PROGRAM = Path(__file__).with_name("canary_aot_programs.py")


def test_shipped_variants_compile_for_sm_90() -> None:
    assert "compiled" in compile_in_a_process([str(PROGRAM)])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
