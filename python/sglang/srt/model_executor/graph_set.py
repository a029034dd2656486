"""The captured graphs of one kind of forward, and the choice among them.

Every graph runner owns one or two sets. Knows keys, padded sizes and graphs, but no
models, batches or attention.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

import torch

from sglang.srt.forward.graph_capture import (
    BreakableGraph,
    RehearsalBackend,
    SegmentBackend,
    capture_graph,
)
from sglang.srt.utils.progress import with_progress

logger = logging.getLogger(__name__)

K = TypeVar("K")


class GraphSet(Generic[K]):
    """One graph per key, all captured on construction.

    Args:
        name: name of the forwards, for the log.
        keys: one per graph, in any order.
        size_of: rows or tokens that the graph of a key computes, including padding.
        capture: makes the graph of a key. The largest is captured first, so that the
            smaller graphs fit into its memory.
        level: log level of its messages.

    Attributes:
        graphs: graphs by ascending size.
        largest: rows or tokens of the largest graph; 0 without graphs.
    """

    def __init__(
        self,
        name: str,
        keys: Iterable[K],
        *,
        size_of: Callable[[K], int],
        capture: Callable[[K], BreakableGraph],
        level: int = logging.INFO,
    ) -> None:
        began = time.perf_counter()
        ascending = sorted(keys, key=size_of)
        with torch.inference_mode():
            largest_first = with_progress(
                reversed(ascending),
                total=len(ascending),
                what=f"Capturing {name} graphs",
                unit="graph",
                logger=logger,
            )
            captured = [(key, capture(key)) for key in largest_first]
        self._entries = captured[::-1]
        self._sizes = [size_of(key) for key in ascending]
        self.graphs = [graph for _, graph in self._entries]
        self.largest = max(self._sizes, default=0)
        if self.graphs:
            logger.log(
                level,
                "Captured %d %s graphs (sizes up to %d, %d segments) in %.1f s",
                len(self.graphs),
                name,
                self.largest,
                self.num_segments,
                time.perf_counter() - began,
            )

    def serving(self, count: int) -> tuple[K, BreakableGraph]:
        """Return the smallest graph for `count` (at most `largest`) rows or tokens, and
        its key."""
        return self._entries[bisect.bisect_left(self._sizes, count)]

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)

    def reset_counts(self) -> None:
        """Forget the replays."""
        for graph in self.graphs:
            graph.num_replays = 0

    @property
    def num_segments(self) -> int:
        return sum(graph.num_breaks + 1 for graph in self.graphs)


def log_level(backend: SegmentBackend) -> int:
    """Return the log level for captures of `backend`."""
    return logging.DEBUG if isinstance(backend, RehearsalBackend) else logging.INFO


def capture_warm(
    run: Callable[[], object], *, backend: SegmentBackend, warm_ups: int
) -> BreakableGraph:
    """Capture a call of `run`, whose result becomes the graph's outputs.

    Args:
        warm_ups: calls before the capture. They load kernels and allocate permanent
            memory, neither of which is allowed during a capture.
    """
    for _ in range(warm_ups):
        run()
    with capture_graph(backend) as graph:
        graph.outputs = run()
    return graph


class ShallowModel(Protocol):
    def shallow(self) -> AbstractContextManager[None]:
        """As `StackedModel.shallow`."""


class WarmUp:
    """Captures the graphs of one set, each warm. The first, which is the largest, comes
    after `calls` calls of all layers; the others after one call of a few layers, which
    use the same kernels.
    """

    def __init__(self, calls: int, model: ShallowModel) -> None:
        self._calls = calls
        self._model = model

    def capture(
        self, run: Callable[[], object], backend: SegmentBackend
    ) -> BreakableGraph:
        """As `capture_warm`."""
        if self._calls > 0:
            calls, self._calls = self._calls, 0
            return capture_warm(run, backend=backend, warm_ups=calls)
        with self._model.shallow():
            run()
        return capture_warm(run, backend=backend, warm_ups=0)
