"""The draft extend after verification as graphs, one per padded number of requests.

Each graph also chooses the row that counts and that row's candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sglang.srt.model_executor.cuda_graph_runner import WARM_UPS, cuda_graph_backend
from sglang.srt.model_executor.graph_set import GraphSet, capture_warm, log_level

if TYPE_CHECKING:
    from sglang.srt.draft_trees.workspace import WorkspaceRows
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.forward.graph_capture import BreakableGraph, SegmentBackend
    from sglang.srt.speculative.eagle_draft_extend import DraftExtend


class EAGLEDraftExtendCudaGraphRunner:
    """Replays draft extends. Reads and writes their workspace in place.

    Args:
        extend: the extends to capture.
        batch_sizes: padded numbers of requests, one graph each.
        make_backend: captures segments.

    Attributes:
        graphs: graphs by padded number of requests.
    """

    def __init__(
        self,
        extend: DraftExtend,
        *,
        batch_sizes: list[int],
        make_backend: Callable[[], SegmentBackend] = cuda_graph_backend,
    ) -> None:
        self._extend = extend
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
            lens_cpu=self._extend.host_lens(seq_lens, bs=size),
        )
        self._extend.attn_backend.init_replay(static)
        graph.replay()

    def _capture_graph(self, size: int) -> BreakableGraph:
        extend = self._extend
        views = extend.workspace.rows(size)
        static = extend.batch(views, seq_lens=extend.no_lens)
        self._static_batches[size] = static
        self._extend.attn_backend.init_capture(static, size)
        run = partial(self.run_once, views)
        return capture_warm(run, backend=self._backend, warm_ups=WARM_UPS)

    def run_once(self, views: WorkspaceRows) -> None:
        """Run a draft extend over these rows of the workspace."""
        self._extend.forward(self._extend.batch(views))
