"""Registration of test files with `test/run_suite.py`.

The calls do nothing when a file runs: the runner reads them from the source with `ast`,
so their arguments are literals at module level.
"""

from __future__ import annotations


def register_cpu_ci(
    *, est_time: float, suite: str, full_time: float | None = None
) -> None:
    """Register this file to run without an accelerator, in `suite`.

    Args:
        est_time: seconds at the counts of `make test`.
        full_time: seconds at whole counts, where that is many times more.
    """


def register_cuda_ci(
    *, est_time: float, suite: str, full_time: float | None = None
) -> None:
    """Register this file to run on an NVIDIA GPU, in `suite`."""
