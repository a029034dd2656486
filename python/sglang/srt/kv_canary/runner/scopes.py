"""The scopes of a forward that is a launch of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager


def context_tuple(
    manager: CanaryManager | None, *, index: int, forward_batch: ForwardBatch
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Scopes (of the launch, of the forward) of forward `index` alone; both do nothing
    without a manager."""
    if manager is None:
        return nullcontext(), nullcontext()
    return (
        manager.with_ops_outside_graph(
            single_forward_indices=(index,),
            maybe_inaccurate_forward_batch=forward_batch,
        ),
        manager.with_active_single_forward_manager(index),
    )
