"""The whole draft phase as graphs, one per padded number of requests: S - 1 forwards,
the choices between them, and the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sglang.srt.model_executor.cuda_graph_runner import WARM_UPS, cuda_graph_backend
from sglang.srt.model_executor.graph_set import GraphSet, capture_warm, log_level

if TYPE_CHECKING:
    from sglang.srt.forward.graph_capture import BreakableGraph, SegmentBackend
    from sglang.srt.speculative.eagle_draft_phase import DraftPhase


class EAGLEDraftCudaGraphRunner:
    """Replays draft phases. Reads and writes their workspace in place.

    Args:
        phase: the draft phase to capture.
        batch_sizes: padded numbers of requests, one graph each.
        make_backend: captures segments.

    Attributes:
        graphs: graphs by padded number of requests.
    """

    def __init__(
        self,
        phase: DraftPhase,
        *,
        batch_sizes: list[int],
        make_backend: Callable[[], SegmentBackend] = cuda_graph_backend,
    ) -> None:
        self._phase = phase
        self._backend = make_backend()
        self.graphs = GraphSet(
            "draft",
            batch_sizes,
            size_of=int,
            capture=self._capture_graph,
            level=log_level(self._backend),
        )

    def can_run(self, bs: int) -> bool:
        return bs <= self.graphs.largest

    def replay(self, bs: int, *, seq_lens: Sequence[int] | None = None) -> None:
        """Run the smallest graph for `bs` requests.

        Args:
            seq_lens: their KV lengths on the host, if the backend needs them.
        """
        size, graph = self.graphs.serving(bs)
        self._phase.plan(seq_lens, graph_rows=size)
        graph.replay()

    def _capture_graph(self, size: int) -> BreakableGraph:
        self._phase.plan(self._phase.no_lens, graph_rows=size)
        run = partial(self.run_once, size)
        return capture_warm(run, backend=self._backend, warm_ups=WARM_UPS)

    def run_once(self, size: int) -> None:
        """Run a draft phase over the first `size` rows of the workspace."""
        self._phase.forward(self._phase.workspace.rows(size))
