"""The scopes that `CanaryManager` opens around launches and forwards.

Classes and not generators: a step of a small model on the CPU notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.kv_canary.single_forward_manager.manager import SingleForwardManager


class LaunchScope:
    """`CanaryManager.with_ops_outside_graph`."""

    def __init__(
        self, manager: CanaryManager, indices: Sequence[int], batch: ForwardBatch
    ) -> None:
        self._manager = manager
        self._indices = indices
        self._batch = batch

    def __enter__(self) -> None:
        self._manager.open_launch(self._indices, self._batch)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._manager.close_launch(self._indices, self._batch, has_run=kind is None)


class ForwardScope:
    """`CanaryManager.with_active_single_forward_manager`."""

    def __init__(self, manager: CanaryManager, forward: SingleForwardManager) -> None:
        self._manager = manager
        self._forward = forward

    def __enter__(self) -> None:
        self._manager.open_forward(self._forward)

    def __exit__(self, *rest: object) -> None:
        self._manager.active = None
