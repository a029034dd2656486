"""The example of `kv-canary/README.md`, on a pool that no engine owns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="cpu")

README = Path(__file__).resolve().parents[3] / "kv-canary" / "README.md"
PROBE = """
import sys
assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]
"""


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    return str(code)


@pytest.mark.parametrize("has_native", [True, False], ids=["native", "torch"])
def test_the_example_names_an_overwritten_slot(has_native: bool) -> None:
    """Run on its own: nothing of the engine is imported, with or without the native
    kernels."""
    hidden = "import sys\nsys.modules['sglang_kernels'] = None\n"
    program = example() + PROBE if has_native else hidden + example() + PROBE
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line == "request A 20 3 bytes changed in place"
    assert f"`{line}`" in README.read_text()


def test_the_example_has_thirty_lines() -> None:
    """Without imports and blank lines."""
    lines = [line for line in example().splitlines() if line.strip()]
    assert len([line for line in lines if "import" not in line]) <= 30


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
