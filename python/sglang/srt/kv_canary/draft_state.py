"""The check of what a draft hands on beside its KV: from iteration to iteration through
the relay, and from a verification to the extend after it.

Sums are noted from what was computed and compared with what is about to be used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.carried import CarriedRows
from sglang.srt.kv_canary.kernels import check_carried, note_carried

if TYPE_CHECKING:
    from kv_canary.state import CanaryState
    from sglang.srt.draft_trees.buffers import DraftCandidates
    from sglang.srt.draft_trees.workspace import WorkspaceRows


class DraftState:
    """The sums of one draft worker.

    Args:
        state: of the draft's pool.
        req_rows: rows of the request table.
        max_nodes: nodes of all trees of the largest batch.
    """

    def __init__(self, state: CanaryState, *, req_rows: int, max_nodes: int) -> None:
        self._state = state
        self._of_requests = state.counters.new_zeros(req_rows)
        self._of_nodes = state.counters.new_zeros(max_nodes)
        self._places = torch.arange(max_nodes, device=state.counters.device)

    def on_stash(
        self,
        req_rows: Tensor,
        serials: Tensor,
        candidates: DraftCandidates,
        hidden: Tensor | None,
    ) -> None:
        """Note what requests' next iterations start from, before it is stashed."""
        rows = self._of(req_rows, serials, serials, candidates, hidden)
        note_carried(self._state, rows)

    def on_gather(
        self, live: WorkspaceRows, candidates: DraftCandidates, hidden: Tensor | None
    ) -> None:
        """Check what an iteration starts from."""
        row, serial = live.identity[0], live.identity[1]
        rows = self._of(row, serial, live.seq_lens, candidates, hidden)
        check_carried(self._state, rows)

    def on_verify(self, live: WorkspaceRows, hidden: Tensor) -> None:
        """Note the target's hidden states of all nodes, [b * D, width]."""
        count = live.tree.tokens.numel()
        rows = self._of_live(live, self._places[:count], hidden[:count])
        note_carried(self._state, rows)

    def on_take(self, live: WorkspaceRows) -> None:
        """Check the hidden states of the accepted nodes, by what was accepted."""
        assert live.hidden_states is not None
        places = live.result.accept_index.view(-1)
        check_carried(self._state, self._of_live(live, places, live.hidden_states))

    def _of(
        self,
        req_rows: Tensor,
        serials: Tensor,
        positions: Tensor,
        candidates: DraftCandidates,
        hidden: Tensor | None,
    ) -> CarriedRows:
        return CarriedRows(
            places=req_rows,
            req_rows=req_rows,
            serials=serials,
            positions=positions,
            hidden=hidden,
            ids=candidates.ids,
            probs=candidates.probs,
            sums=self._of_requests,
        )

    def _of_live(
        self, live: WorkspaceRows, places: Tensor, hidden: Tensor
    ) -> CarriedRows:
        return CarriedRows(
            places=places,
            req_rows=live.identity[0],
            serials=live.identity[1],
            positions=live.seq_lens,
            hidden=hidden,
            ids=None,
            probs=None,
            sums=self._of_nodes,
        )
