"""State of the process that every test finds as if it were the first."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from sglang.srt.utils.logging import ROOTS
from sglang.test.scale import sampled

# Files whose kernels Triton's interpreter runs where there is no GPU, thousands of
# times slower: so many variants of each of their tests run in CI, all with whole
# counts.
INTERPRETED = {"triton/": 8, "spec/test_tree_ops": 10}


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if torch.cuda.is_available():
        return
    for prefix, variants in INTERPRETED.items():
        start = str(Path(__file__).parent / prefix)
        own = [item for item in items if str(item.path).startswith(start)]
        kept = {id(item) for item in sampled(own, key=_test_of, ci=variants)}
        dropped = [item for item in own if id(item) not in kept]
        config.hook.pytest_deselected(items=dropped)
        gone = {id(item) for item in dropped}
        items[:] = [item for item in items if id(item) not in gone]


def _test_of(item: pytest.Item) -> str:
    """A test without its variant."""
    return item.nodeid.split("[")[0]


@pytest.fixture(autouse=True)
def logging_reaches_pytest() -> None:
    """An engine in an earlier test sent the log to stderr, past pytest's capture."""
    for name in ROOTS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
