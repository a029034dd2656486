"""Hooks around model forwards.

`ModelRunner.scopes` is `NullScopes` until something that watches forwards, such as the
KV canary, replaces it. Callers never have to ask whether anything is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.forward.state_plan import DueCheckpoints


class ForwardScopes(Protocol):
    """Watches the forwards of one model runner."""

    def with_ops_outside_graph(
        self,
        *,
        single_forward_indices: Sequence[int],
        maybe_inaccurate_forward_batch: ForwardBatch,
    ) -> AbstractContextManager[None]:
        """Scope around a whole launch, outside any graph.

        Args:
            single_forward_indices: forwards that the launch will run.
            maybe_inaccurate_forward_batch: the live batch; a graph reads its own
                padded copy.
        """

    def with_active_single_forward_manager(
        self, index: int
    ) -> AbstractContextManager[None]:
        """Scope around one model forward of a launch, graph capture included."""

    def on_replay(self) -> None:
        """Note that a graph runs all forwards of the launch without their scopes."""

    def on_commit(
        self,
        *,
        slots: Tensor,
        path: Tensor,
        path_lens: Tensor,
        due: DueCheckpoints | None,
    ) -> None:
        """Note that nodes of the last verification are folded into recurrent states;
        see `ModelRunner.commit_states`."""


class NullScopes:
    """Watches nothing."""

    _nothing = nullcontext()

    def with_ops_outside_graph(
        self,
        *,
        single_forward_indices: Sequence[int],
        maybe_inaccurate_forward_batch: ForwardBatch,
    ) -> AbstractContextManager[None]:
        return self._nothing

    def with_active_single_forward_manager(
        self, index: int
    ) -> AbstractContextManager[None]:
        return self._nothing

    def on_replay(self) -> None:
        """Nothing to note."""

    def on_commit(
        self,
        *,
        slots: Tensor,
        path: Tensor,
        path_lens: Tensor,
        due: DueCheckpoints | None,
    ) -> None:
        """Nothing to note."""


def context_tuple(
    scopes: ForwardScopes | None, *, index: int, forward_batch: ForwardBatch
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Scopes (of the launch, of the forward) of forward `index` alone; without `scopes`
    both do nothing."""
    scopes = NullScopes() if scopes is None else scopes
    return (
        scopes.with_ops_outside_graph(
            single_forward_indices=(index,),
            maybe_inaccurate_forward_batch=forward_batch,
        ),
        scopes.with_active_single_forward_manager(index),
    )
