"""Fixtures of the tests of the front."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Warnings of the engine, which `configure_logging` may have cut off from pytest's
    handler."""
    logger = logging.getLogger("sglang")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.WARNING, logger="sglang"):
        yield caplog
    logger.propagate = before
