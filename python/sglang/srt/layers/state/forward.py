"""The states that a forward reads and writes, made once for all of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.layers.ops.state.shared.tracks import StateTracks

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.mem_cache.state_pool import LayerState, StatePool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForward:
    """One forward of R rows.

    Fields:
        slots: [R] int64, the slot of each row; 0 for padding.
        qo_indptr, has_state: as in `short_conv_prefill`; None in a decode step.
        tracks: checkpoints of a prefill, or None.
    """

    pool: StatePool
    slots: Tensor
    qo_indptr: Tensor | None = None
    has_state: Tensor | None = None
    tracks: StateTracks | None = None

    @classmethod
    def of(cls, pool: StatePool, batch: ForwardBatch) -> StateForward:
        if batch.qo_indptr is None:
            return cls(pool=pool, slots=batch.req_pool_indices)
        plan, tracks = batch.state_plan, None
        if plan is not None and plan.track_lens is not None:
            assert plan.track_slots is not None
            tracks = StateTracks(lens=plan.track_lens, slots=plan.track_slots)
        return cls(
            pool=pool,
            slots=batch.req_pool_indices,
            qo_indptr=batch.qo_indptr,
            has_state=batch.prefix_lens > 0,
            tracks=tracks,
        )

    def layer(self, layer_id: int) -> LayerState:
        return self.pool.layer(layer_id)
