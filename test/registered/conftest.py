"""State of the process that every test finds as if it were the first."""

from __future__ import annotations

import logging

import pytest

from sglang.srt.utils.logging import ROOTS


@pytest.fixture(autouse=True)
def logging_reaches_pytest() -> None:
    """An engine in an earlier test sent the log to stderr, past pytest's capture."""
    for name in ROOTS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
