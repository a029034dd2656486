"""The draft extend after verification, the choice of the row that counts and of its
candidates included, as one graph per size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.workspace_graphs import WorkspaceGraphs

if TYPE_CHECKING:
    from sglang.srt.speculative.eagle_draft_worker import EagleDraftWorker


class EAGLEDraftExtendCudaGraphRunner(WorkspaceGraphs):
    def __init__(self, worker: EagleDraftWorker, *, batch_sizes: list[int]) -> None:
        batches: dict[int, ForwardBatch] = {}
        attention = worker.draft_runner.attn_backend

        def prepare(size: int) -> Callable[[], None]:
            part = worker.workspace.rows(size)
            batch = worker.extend_batch(part, seq_lens=worker.no_lens)
            batches[size] = batch
            attention.init_capture(batch, size)
            return lambda: worker.extend_forward(worker.extend_batch(part))

        def plan(size: int, seq_lens: Sequence[int] | None) -> None:
            # Of the batch of the capture, metadata reads what lies in the workspace:
            # rows and lengths. Its positions and slots are those of then.
            lens_cpu = worker.extend_lens(seq_lens, count=size)
            live = dataclasses.replace(batches[size], lens_cpu=lens_cpu)
            attention.init_replay(live)

        super().__init__("draft extend", prepare, plan=plan, batch_sizes=batch_sizes)
