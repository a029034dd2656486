"""The read check and the head write of a forward in torch, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_canary.kernels.reference.verify import verify
from kv_canary.kernels.reference.write import write_head

if TYPE_CHECKING:
    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView


def before_model(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """Verify the first of `view.reads`, then write the head records. Triton does both
    at once (`triton/before.py`)."""
    verify(state, view, checks, view.reads[0])
    write_head(state, view, checks)
