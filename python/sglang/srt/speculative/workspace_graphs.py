"""Phases of an iteration as graphs over an `EagleWorkspace`: one per padded number of
requests, all reading and writing the workspace in place.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence

import torch

from sglang.srt.model_executor.cuda_graph_runner import WARM_UPS, cuda_graph_backend
from sglang.srt.model_executor.graph_capture import (
    BreakableGraph,
    SegmentBackend,
    capture_graph,
)

logger = logging.getLogger(__name__)


class WorkspaceGraphs:
    """Args:
    name: for the log.
    prepare: called with a size before its warm-ups; returns the phase to capture.
    plan: called before each replay with the graph's size and the requests' KV lengths
        on the host, where attention needs them; those behind are padding without KV.
    batch_sizes: padded numbers of requests, each a graph.
    make_backend: captures segments; tests pass a recorder that needs no GPU.
    """

    def __init__(
        self,
        name: str,
        prepare: Callable[[int], Callable[[], None]],
        *,
        plan: Callable[[int, Sequence[int] | None], None],
        batch_sizes: list[int],
        make_backend: Callable[[], SegmentBackend] = cuda_graph_backend,
    ) -> None:
        self._name = name
        self._prepare = prepare
        self._plan = plan
        self._sizes = sorted(batch_sizes)
        self._make_backend = make_backend
        self._graphs: dict[int, BreakableGraph] = {}
        self._capture()

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self._graphs.values())

    def can_run(self, count: int) -> bool:
        return count <= self._sizes[-1]

    def replay(self, count: int, *, seq_lens: Sequence[int] | None = None) -> None:
        """Run the smallest graph for `count` requests; `seq_lens` as for `plan`."""
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        self._plan(size, seq_lens)
        self._graphs[size].replay()

    def _capture(self) -> None:
        """Largest first, so that the smaller graphs fit into its memory."""
        began = time.perf_counter()
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture_size(size)
        logger.info(
            "Captured %d graphs of the %s (up to %d requests) in %.1f s",
            len(self._sizes),
            self._name,
            self._sizes[-1],
            time.perf_counter() - began,
        )

    def _capture_size(self, size: int) -> BreakableGraph:
        with torch.inference_mode():
            phase = self._prepare(size)
            for _ in range(WARM_UPS):
                phase()
            with capture_graph(self._make_backend()) as graph:
                phase()
        return graph
