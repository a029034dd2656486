"""Folders of what was fetched; a test of what is not there is skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
sys.path.append(str(REPO))

from scripts.published_templates import TEMPLATES  # noqa: E402
from scripts.real_models import MODELS, model_folder  # noqa: E402


def _folder(name: str) -> Path:
    assert name in MODELS
    folder = model_folder(name)
    if not folder.is_dir():
        pytest.skip(f"{name} is not there: scripts/real_models.py fetch {name}")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _folder("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return _folder("gemma3")


@pytest.fixture(scope="session")
def published_templates() -> Path:
    folder = TEMPLATES.folder
    if not folder.is_dir():
        pytest.skip("no templates are there: scripts/published_templates.py fetch")
    return folder
