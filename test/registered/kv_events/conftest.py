"""Endpoints of a test's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    """For events and for replays."""
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"
