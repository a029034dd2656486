"""The hooks around model forwards.

`ModelRunner.scopes` is `NullScopes` until `install_canary` replaces it, so that no
caller asks whether anything is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class ForwardScopes(Protocol):
    def launch(
        self, *, forward_batch: ForwardBatch, steps: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Around a whole launch, outside any graph; `steps` will be entered in it."""

    def step(self, index: int) -> AbstractContextManager[None]:
        """Around one model forward, graph capture included."""


class NullScopes:
    """Does nothing."""

    _nothing = nullcontext()

    def launch(
        self, *, forward_batch: ForwardBatch, steps: Sequence[int]
    ) -> AbstractContextManager[None]:
        return self._nothing

    def step(self, index: int) -> AbstractContextManager[None]:
        return self._nothing
