"""Models that the tests of the scheduler share."""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduler_world import write_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))
