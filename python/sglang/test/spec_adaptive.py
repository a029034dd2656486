"""Engines whose drafts change their shape while they run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.scheduler.draft_shapes import DraftShapes
from sglang.test.harness import EngineHarness
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_parity import Traffic, assert_parity, check_no_leak
from sglang.test.spec_world import ModelFolders, References, spec_engine


class InTurn:
    """Every shape of a ladder in turn, plain decoding among them.

    Args:
        iterations: of each shape.
    """

    def __init__(self, shapes: DraftShapes, iterations: int) -> None:
        self._count = len(shapes.ladder)
        self._iterations = iterations
        self._asked = 0

    def choose(self, rows: int, behind: Callable[[], int]) -> int:
        self._asked += 1
        return self._asked // self._iterations % self._count


def run_in_turn(
    folders: ModelFolders,
    references: References,
    config: SpecConfig,
    *,
    iterations: int,
    **options: Any,
) -> EngineHarness:
    """Run random arrivals and aborts while the shape changes, and check that outputs
    are the same as without speculation and that no slot is lost."""
    reference = references[config.model]
    engine = spec_engine(
        folders, config, speculative_adaptive=True, skip_server_warmup=True, **options
    )
    shapes = engine.scheduler.shapes
    shapes.policy = InTurn(shapes, iterations)
    traffic = Traffic(engine, reference.asks, random.Random(str(config)))
    answers = traffic.run()
    assert_parity(
        reference.asks,
        reference.answers,
        answers,
        aborted=traffic.aborted,
        reference=None if config.model == "mock" else reference.engine,
    )
    check_no_leak(engine)
    return engine
