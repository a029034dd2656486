"""Which node of its last tree a row continues from.

SGLang chooses the accepted path of a tree in its own kernels. So the histories of all
nodes are kept until the row's next forward, when the record at the end of its prefix
shows which one it continues. Every op here can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.records import Record

if TYPE_CHECKING:
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView


class TreeHistories:
    """The histories of the newest tree of each row.

    Args:
        state: state of the pool.
        req_to_token: int32 [rows, columns], the engine's own table.
        tree_width: nodes of a verification; 0 if there is none.
    """

    def __init__(
        self, state: CanaryState, req_to_token: Tensor, *, tree_width: int
    ) -> None:
        rows, device = req_to_token.shape[0], req_to_token.device
        self._state = state
        self._table = req_to_token
        self._nodes = torch.zeros(rows, tree_width, dtype=torch.int64, device=device)
        self._has_tree = torch.zeros(rows, dtype=torch.bool, device=device)

    def forget(self, rows: Tensor) -> None:
        """Forget rows that prefill, because the host announced their histories."""
        self._has_tree.index_fill_(0, rows, False)

    def before(self, view: ForwardView) -> None:
        """Set the history of every row whose last forward was a tree."""
        if not self._nodes.shape[1]:
            return
        state, rows = self._state, view.req_rows
        last = (view.prefix_lens - 1).clamp(0, self._table.shape[1] - 1)
        slot = self._table[rows, last].long()
        is_slot = (slot >= 0) & (slot < state.num_slots)
        found = state.tail[slot * is_slot, Record.LINEAGE]
        is_node = (self._nodes[rows] == found[:, None]).any(dim=1)
        takes = self._has_tree[rows] & is_node & is_slot
        expected = state.expected_lineage[rows]
        state.expected_lineage.index_copy_(0, rows, torch.where(takes, found, expected))

    def after(self, view: ForwardView) -> None:
        """Keep the histories of the nodes that a forward stored, if it has trees."""
        if view.parent_index is not None:
            self._note_nodes(view)
        elif self._nodes.shape[1]:
            self._has_tree.index_fill_(0, view.req_rows, False)

    def _note_nodes(self, view: ForwardView) -> None:
        state, width = self._state, self._nodes.shape[1]
        slots = view.out_cache_loc.view(view.num_rows, -1)
        is_slot = (slots >= 0) & (slots < state.num_slots)
        found = state.tail[slots * is_slot, Record.LINEAGE]
        nodes = found[:, :1].expand(-1, width).clone()
        nodes[:, : found.shape[1]] = found[:, :width]
        self._nodes.index_copy_(0, view.req_rows, nodes)
        self._has_tree.index_fill_(0, view.req_rows, True)
