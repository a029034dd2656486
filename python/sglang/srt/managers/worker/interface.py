"""The interface of a worker: all that the scheduler knows of the model's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.grammar_masks import GrammarMasks
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class Worker(Protocol):
    """Runs batches on one device, with or without speculation.

    Attributes:
        model_runner: of the model whose tokens are served.
    """

    model_runner: ModelRunner

    def capture_graphs(self) -> None:
        """Capture the graphs, where there are any; to be called before the first
        forward."""

    def canary_managers(self) -> list[CanaryManager]:
        """One per KV pool that the canary checks; empty while it is off."""

    def forward_batch_generation(
        self, batch: ScheduleBatch, masks: GrammarMasks | None = None
    ) -> GenerationBatchResult:
        """Enqueue the forwards of a prepared batch and the copy of its tokens to the
        host; leave on the device all that the next step starts from.

        Args:
            masks: where a request of the batch has a grammar; the worker asks for the
                masks of the rows that it samples.
        """
