"""The interface of a drafter: everything that verification knows about the drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.draft_trees.relay import DraftRelay
    from sglang.srt.draft_trees.workspace import EagleWorkspace
    from sglang.srt.forward.batch import CaptureHiddenMode
    from sglang.srt.kv_canary.draft_state import DraftState
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.tp_worker import SampledForward
    from sglang.srt.model_executor.memory_plan import DraftMemory
    from sglang.srt.model_executor.model_runner import ModelRunner


class Drafter(Protocol):
    """Drafts trees for a target.

    Attributes:
        relay: tensors between iterations. Set by `init_memory_pool`.
        canary: KV canary of the drafter's pool, or None if off, or without a pool.
        runners: of its models.
        max_behind: as `Worker.max_behind`.
    """

    relay: DraftRelay
    canary: CanaryManager | None
    max_behind: int

    @property
    def workspace(self) -> EagleWorkspace:
        """Tensors of the current iteration. Set by `init_memory_pool`."""

    @property
    def state_check(self) -> DraftState | None:
        """Checks what the current iteration hands on; None as `canary`."""

    def workspaces(self) -> list[EagleWorkspace]:
        """Return the workspaces of all shapes of trees."""

    @property
    def runners(self) -> list[ModelRunner]: ...

    @property
    def target_hidden_mode(self) -> CaptureHiddenMode:
        """Hidden states that the target's forwards must return."""

    def memory(self) -> DraftMemory:
        """Return the device memory this drafter will take. Call it before pools are
        built."""

    def init_memory_pool(self, *, target_canary: CanaryManager | None) -> None:
        """Share the target's rows and slots, and build the rest. The target has its
        memory, and `target_canary` if that is on."""

    def init_prefill_graphs(self) -> None:
        """Capture the drafter's part of prefills, if there is any."""

    def init_decode_graphs(self) -> None:
        """Capture the drafter's part of iterations, if there is any."""

    def begin(self, batch: ScheduleBatch) -> None:
        """Catch up, then put the batch into the workspace of its shape."""

    def catch_up(self, batch: ScheduleBatch) -> None:
        """Compute the draft's KV that the batch's rows lack
        (`ScheduleBatch.catch_up`), and the candidates after it."""

    def draft(self, bs: int, *, batch: ScheduleBatch) -> None:
        """Draft a tree for each of the `bs` requests of the workspace, and set where
        its nodes go."""

    def after_prefill(self, batch: ScheduleBatch, done: SampledForward) -> None:
        """Follow the target's prefill `done` of `batch`, whose sampled tokens and
        lengths are published."""

    def after_verify(self, bs: int, *, batch: ScheduleBatch) -> None:
        """Follow a verification, whose tokens and lengths are published."""

    def after_plain(self, done: SampledForward) -> None:
        """Follow a plain step of the target, whose tokens and lengths are published:
        keep what `catch_up` will read."""

    def on_checkpoint(self) -> None:
        """As `Worker.on_checkpoint`."""
