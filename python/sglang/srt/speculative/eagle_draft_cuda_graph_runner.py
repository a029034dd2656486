"""The whole draft phase, S - 1 forwards, choices and tree, as one graph per size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sglang.srt.speculative.workspace_graphs import WorkspaceGraphs

if TYPE_CHECKING:
    from sglang.srt.speculative.eagle_draft_worker import EagleDraftWorker


class EAGLEDraftCudaGraphRunner(WorkspaceGraphs):
    def __init__(self, worker: EagleDraftWorker, *, batch_sizes: list[int]) -> None:
        def prepare(size: int) -> Callable[[], None]:
            worker.plan_draft(worker.no_lens, graph_rows=size)
            return partial(worker.draft_forward, worker.workspace.rows(size))

        def plan(size: int, seq_lens: Sequence[int] | None) -> None:
            worker.plan_draft(seq_lens, graph_rows=size)

        super().__init__("draft phase", prepare, plan=plan, batch_sizes=batch_sizes)
