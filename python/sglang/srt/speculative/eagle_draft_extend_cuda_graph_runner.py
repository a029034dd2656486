"""The draft extend after verification as graphs, one per padded number of requests.

Each graph also chooses the row that counts and that row's candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from sglang.srt.model_executor.cuda_graph_runner import WARM_UPS, cuda_graph_backend
from sglang.srt.model_executor.graph_set import GraphSet, capture_warm, log_level

if TYPE_CHECKING:
    from sglang.srt.draft_trees.workspace import EagleWorkspace, WorkspaceRows
    from sglang.srt.forward.batch import ForwardBatch, HostLens
    from sglang.srt.forward.graph_capture import BreakableGraph, SegmentBackend
    from sglang.srt.model_executor.model_runner import ModelRunner


class DraftExtender(Protocol):
    """Runs draft extends over a workspace: `EagleDraftWorker`."""

    draft_runner: ModelRunner
    no_lens: list[int] | None

    @property
    def workspace(self) -> EagleWorkspace: ...

    def extend_lens(
        self, seq_lens: Sequence[int] | None, *, bs: int
    ) -> HostLens | None: ...

    def extend_batch(
        self, views: WorkspaceRows, *, seq_lens: Sequence[int] | None = None
    ) -> ForwardBatch: ...

    def extend_forward(self, forward_batch: ForwardBatch) -> None: ...


class EAGLEDraftExtendCudaGraphRunner:
    """Replays draft extends. Reads and writes the worker's workspace in place.

    Args:
        worker: runs the extends to capture.
        batch_sizes: padded numbers of requests, one graph each.
        make_backend: captures segments.

    Attributes:
        graphs: graphs by padded number of requests.
    """

    def __init__(
        self,
        worker: DraftExtender,
        *,
        batch_sizes: list[int],
        make_backend: Callable[[], SegmentBackend] = cuda_graph_backend,
    ) -> None:
        self._worker = worker
        self._attn_backend = worker.draft_runner.attn_backend
        self._backend = make_backend()
        self._static_batches: dict[int, ForwardBatch] = {}
        self.graphs = GraphSet(
            "draft extend",
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
        # Metadata reads rows and lengths, which are views of the workspace. Positions
        # and slots still have the values of the capture and are not read.
        static = dataclasses.replace(
            self._static_batches[size],
            lens_cpu=self._worker.extend_lens(seq_lens, bs=size),
        )
        self._attn_backend.init_replay(static)
        graph.replay()

    def _capture_graph(self, size: int) -> BreakableGraph:
        worker = self._worker
        views = worker.workspace.rows(size)
        static = worker.extend_batch(views, seq_lens=worker.no_lens)
        self._static_batches[size] = static
        self._attn_backend.init_capture(static, size)
        run = partial(self.run_once, views)
        return capture_warm(run, backend=self._backend, warm_ups=WARM_UPS)

    def run_once(self, views: WorkspaceRows) -> None:
        """Run a draft extend over these rows of the workspace."""
        self._worker.extend_forward(self._worker.extend_batch(views))
