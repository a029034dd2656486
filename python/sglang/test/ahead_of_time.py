"""Runs programs that compile Triton kernels without a GPU.

They use the lowest Triton that is served, where `make venv` installed it beside the
newest: a kernel that the newest compiles may be beyond the one that a GPU machine has.
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

    A process of its own: the interpreter, once chosen, stays for all kernels.

    Raises:
        AssertionError: it failed; has its output.
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
