"""The draft extend after verification, the choice of the row that counts and of its
candidates included, as one graph per size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.speculative.workspace_graphs import WorkspaceGraphs

if TYPE_CHECKING:
    from sglang.srt.speculative.eagle_draft_worker import EagleDraftWorker


class EAGLEDraftExtendCudaGraphRunner(WorkspaceGraphs):
    def __init__(self, worker: EagleDraftWorker, *, batch_sizes: list[int]) -> None:
        def prepare(size: int) -> Callable[[], None]:
            part = worker.workspace.rows(size)
            batch = worker.extend_batch(part)
            worker.draft_runner.attn_backend.init_capture(batch, size)
            return lambda: worker.extend_forward(worker.extend_batch(part))

        super().__init__("draft extend", prepare, batch_sizes=batch_sizes)
