"""Kernels of a piece of work are compiled before it is done, and are those that it
asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from sglang.test.ahead_of_time import compile_in_a_process
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.head_models import add_head
from sglang.test.hybrid_models import write_hybrid_model

register_cpu_ci(est_time=15, suite="cpu")

PROGRAM = Path(__file__).with_name("kernels_ahead_program.py")
REHEARSAL = Path(__file__).with_name("rehearsal_program.py")
HYBRID = "Qwen3_5ForCausalLM"


def test_launches_are_left_out_and_compiled() -> None:
    assert "were ahead" in compile_in_a_process([str(PROGRAM)])


def test_drafts_are_rehearsed_without_kernels(tmp_path: Path) -> None:
    """Requests end although no kernel has counted what is accepted."""
    # Written here: the program would import transformers for it.
    add_head(write_hybrid_model(tmp_path / "target", HYBRID), HYBRID)
    said = compile_in_a_process([str(REHEARSAL), str(tmp_path)])
    assert "kernels are compiled for trees" in said


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
