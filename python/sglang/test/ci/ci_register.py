"""Registration of test files with `test/run_suite.py`.

The calls do nothing when a file runs: the runner reads them from the source with `ast`,
so their arguments are literals at module level.
"""

from __future__ import annotations


def register_cpu_ci(*, est_time: float, suite: str) -> None:
    """This file runs on a machine without an accelerator, in `suite`; seconds."""


def register_cuda_ci(*, est_time: float, suite: str) -> None:
    """This file runs on an NVIDIA GPU, in `suite`; seconds."""
