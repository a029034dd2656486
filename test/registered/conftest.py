"""What every test finds as if it were the first of its process."""

from __future__ import annotations

import logging

import pytest

from sglang.srt.utils.logging import ROOT


@pytest.fixture(autouse=True)
def logging_reaches_pytest() -> None:
    """An engine in an earlier test sent the log to stderr, past pytest's capture."""
    logger = logging.getLogger(ROOT)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
