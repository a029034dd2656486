"""The states that a forward reads and writes, made once for all of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.forward.batch import ForwardMode
from sglang.srt.layers.ops.state.shared.tracks import StateTracks

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.state.nodes import LayerNodes, StateNodes
    from sglang.srt.mem_cache.state_pool import LayerState, StatePool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTrees:
    """The R trees of D nodes that a verification reads states for.

    Fields:
        parent_index: [R, D] int64; mask: [R, D, D] bool; as in `DraftTree`.
        nodes: written by the layers.
    """

    parent_index: Tensor
    mask: Tensor
    nodes: StateNodes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForward:
    """One forward of R rows.

    Fields:
        slots: [R] int64, the slot of each row; 0 for padding.
        qo_indptr, has_state: as in `short_conv_prefill`; of a prefill.
        tracks: checkpoints of a prefill, or None.
        trees: of a verification.
    """

    pool: StatePool
    slots: Tensor
    qo_indptr: Tensor | None = None
    has_state: Tensor | None = None
    tracks: StateTracks | None = None
    trees: StateTrees | None = None

    @classmethod
    def of(
        cls, pool: StatePool, nodes: StateNodes | None, batch: ForwardBatch
    ) -> StateForward:
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            assert nodes is not None
            return cls(
                pool=pool, slots=batch.req_pool_indices, trees=_trees(nodes, batch)
            )
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

    def prefill_rows(self) -> dict[str, Any]:
        """Return the rows as prefill operations take them."""
        return {
            "slots": self.slots,
            "qo_indptr": self.qo_indptr,
            "has_state": self.has_state,
            "tracks": self.tracks,
        }

    def layer(self, layer_id: int) -> LayerState:
        return self.pool.layer(layer_id)


def _trees(nodes: StateNodes, batch: ForwardBatch) -> StateTrees:
    rows = batch.batch_size
    width = batch.num_tokens // rows
    if batch.parent_index is not None and batch.tree_mask is not None:
        parents = batch.parent_index.view(rows, width)
        return StateTrees(parent_index=parents, mask=batch.tree_mask, nodes=nodes)
    # A chain: every node follows the one before it.
    device = batch.input_ids.device
    steps = torch.arange(rows * width, device=device).view(rows, width) - 1
    steps[:, 0] = -1
    seen = torch.ones((rows, width, width), dtype=torch.bool, device=device).tril_()
    return StateTrees(parent_index=steps, mask=seen, nodes=nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCommit:
    """Accepted nodes of the last verification, for R rows.

    Fields:
        slots: [R] int64. path: [R, P] int64, accepted nodes among all nodes, the root
            first; path_lens: [R] int64, how many.
        num_nodes: of the verification.
    """

    pool: StatePool
    nodes: StateNodes
    slots: Tensor
    path: Tensor
    path_lens: Tensor
    num_nodes: int

    def layer_nodes(self, layer_id: int) -> LayerNodes:
        return self.nodes.layer(layer_id).narrow(self.num_nodes)

    def rows(self) -> dict[str, Tensor]:
        """Return the rows as commit operations take them."""
        return {"slots": self.slots, "path": self.path, "path_lens": self.path_lens}
