"""Runs programs that compile Triton kernels without a GPU.

They use the lowest supported Triton, if `make venv` installed it next to the newest: a
kernel that the newest compiles may fail in a GPU machine's version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LOWEST_TRITON = Path(sys.prefix) / "lowest-triton"


def compile_in_a_process(
    command: Sequence[str], *, env: dict[str, str] | None = None
) -> str:
    """Run Python with `command` and return its output.

    Uses a separate process, because a chosen interpreter stays for all kernels.

    Raises:
        AssertionError: the program failed; contains its output.
    """
    environment = dict(os.environ if env is None else env)
    paths = [str(LOWEST_TRITON), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    if LOWEST_TRITON.is_dir():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout
