"""The HTTP process stays light: neither torch nor transformers is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

HEAVY = ("torch", "transformers", "numpy", "llguidance", "huggingface_hub")


@pytest.mark.parametrize(
    "module", ["sglang", "sglang.launch_server", "sglang.srt.entrypoints.engine"]
)
def test_the_front_imports_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_reading_the_tokenizer_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from sglang.srt.utils.hf_tokenizer import load_tokenizer\n"
        "from sglang.srt.utils.paths import bundled_demo_model_path\n"
        "load_tokenizer(str(bundled_demo_model_path())).encode('x')\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
