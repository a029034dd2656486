"""The interface of a worker: everything the scheduler knows about the model's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.grammar_masks import GrammarMasks
    from sglang.srt.model_executor.model_runner import ModelRunner


class Worker(Protocol):
    """Runs batches on one device, with or without speculation.

    Attributes:
        model_runner: runner of the model whose tokens are served.
        max_behind: as `BatchEnvironment.max_behind`.
    """

    model_runner: ModelRunner
    max_behind: int

    def capture_graphs(self) -> None:
        """Capture the graphs, if there are any; call before the first forward."""

    def catch_up(self, batch: ScheduleBatch) -> None:
        """Compute now what the draft's KV lacks (`ScheduleBatch.catch_up`). Nothing is
        in flight."""

    def on_checkpoint(self) -> None:
        """Forget what depends on earlier steps and is in no checkpoint: a replay
        continues from here. Nothing is in flight."""

    def model_runners(self) -> list[ModelRunner]:
        """The runners of all models, `model_runner` first."""

    def canary_managers(self) -> list[CanaryManager]:
        """One manager per KV pool that the canary checks; empty while it is off."""

    def forward_batch_generation(
        self, batch: ScheduleBatch, masks: GrammarMasks | None = None
    ) -> GenerationBatchResult:
        """Enqueue the forwards of a prepared batch and the copy of its tokens to the
        host. Everything the next step starts from stays on the device.

        Args:
            masks: provides masks for the rows that the worker samples, or None if no
                request of the batch has a grammar.
        """
