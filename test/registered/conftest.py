"""What every test finds as if it were the first of its process."""

from __future__ import annotations

import logging
import os

import pytest

from sglang.srt.utils.logging import ROOT


def pytest_configure(config: pytest.Config) -> None:
    """Workers of one machine share its cores, so each computes with one thread; before
    anything imports torch."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def logging_reaches_pytest() -> None:
    """An engine in an earlier test sent the log to stderr, past pytest's capture."""
    logger = logging.getLogger(ROOT)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
