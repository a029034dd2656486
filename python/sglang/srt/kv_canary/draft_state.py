"""The check of what a draft hands on beside its KV: from iteration to iteration through
the relay, from level to level of a tree, from a verification to the extend after it,
from an extend to its head.

Sums are noted from what was computed and compared with what is about to be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.carried import CarriedRows
from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.kv_canary.kernels import check_carried, note_carried

if TYPE_CHECKING:
    from kv_canary.state import CanaryState
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.draft_trees.buffers import DraftCandidates
    from sglang.srt.draft_trees.workspace import WorkspaceRows
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.logits_processor import HeadCall


class DraftState:
    """The sums of one draft worker.

    Args:
        state: of the draft's pool.
        max_requests: requests of the largest batch; the request table has one more row.
        shape: of the trees.
    """

    def __init__(
        self, state: CanaryState, *, max_requests: int, shape: TreeShape
    ) -> None:
        self._state = state
        max_nodes = max_requests * shape.num_draft_tokens
        self._of_requests = state.counters.new_zeros(max_requests + 1)
        self._of_nodes = state.counters.new_zeros(max_nodes)
        self._of_heads = state.counters.new_zeros(max_nodes)
        self._places = torch.arange(max_nodes, device=state.counters.device)
        self._levels = _LevelPlaces.create(
            max_requests, shape, device=state.counters.device
        )
        self._of_groups = state.counters.new_zeros(max_requests * shape.num_groups)

    def on_head(self, forward_batch: ForwardBatch, head: HeadCall) -> None:
        """Check the rows that the head of an extend read, one per request: of its last
        token, or of the last accepted one."""
        offsets = forward_batch.qo_indptr
        assert offsets is not None
        last = offsets[1:] - 1
        if forward_batch.forward_mode is ForwardMode.DRAFT_EXTEND_V2:
            given = forward_batch.spec_info
            assert isinstance(given, EagleDraftInput) and given.accept_lens is not None
            last = offsets[:-1] + given.accept_lens - 1
        rows = CarriedRows(
            places=self._places[: len(last)],
            req_rows=forward_batch.req_pool_indices,
            serials=forward_batch.req_serial,
            positions=forward_batch.prefix_lens,
            # A padding row may have accepted nothing: -1 is an index, too.
            hidden=head.hidden[last],
            ids=None,
            probs=None,
            sums=self._of_heads,
            clock_offset=-1,
        )
        note_carried(self._state, rows)
        check_carried(self._state, replace(rows, hidden=head.inputs))

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
        """Check what an iteration starts from, and note it as level 0 of the tree."""
        row, serial = live.identity[0], live.identity[1]
        rows = self._of(row, serial, live.seq_lens, candidates, hidden)
        check_carried(self._state, rows)
        self.on_level(live, 0, hidden)

    def on_level(self, live: WorkspaceRows, level: int, hidden: Tensor | None) -> None:
        """Note the hidden states that propose a level's candidates, one per request at
        level 0, then one per branch, if a level follows it and reads them."""
        if hidden is None or level == len(self._levels.made):
            return
        places = self._levels.made[level][: len(hidden)]
        rows = self._of_live(live, places, hidden, self._of_groups)
        note_carried(self._state, rows)

    def on_descend(self, live: WorkspaceRows, level: int, hidden: Tensor) -> None:
        """Check the hidden states that the branches of a level continue from, by the
        candidates that `select_top_k` chose."""
        places = self._levels.followed(level, live.levels.parents)
        rows = self._of_live(live, places, hidden, self._of_groups)
        check_carried(self._state, rows)

    def on_verify(self, live: WorkspaceRows, hidden: Tensor) -> None:
        """Note the target's hidden states of all nodes, [b * D, width]."""
        count = live.tree.tokens.numel()
        places = self._places[:count]
        rows = self._of_live(live, places, hidden[:count], self._of_nodes)
        note_carried(self._state, rows)

    def on_take(self, live: WorkspaceRows) -> None:
        """Check the hidden states of the accepted nodes, by what was accepted."""
        assert live.hidden_states is not None
        places = live.result.accept_index.view(-1)
        rows = self._of_live(live, places, live.hidden_states, self._of_nodes)
        check_carried(self._state, rows)

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

    @staticmethod
    def _of_live(
        live: WorkspaceRows, places: Tensor, hidden: Tensor, sums: Tensor
    ) -> CarriedRows:
        return CarriedRows(
            places=places,
            req_rows=live.identity[0],
            serials=live.identity[1],
            positions=live.seq_lens,
            hidden=hidden,
            ids=None,
            probs=None,
            sums=sums,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LevelPlaces:
    """Places of hidden states between the levels of a tree, for n requests.

    A hidden state proposes one group of K candidates, so candidate c of a request
    continues from the state of group c // K (`DraftLevels`).

    Fields:
        made: for each level but the last int64 [n] or [n * K], the groups that propose
            its candidates.
        known: for each of them int64 [n * K], the groups that its branches continue
            from; None if only the parents say so.
        groups: int64 [n, candidates], the group of each candidate.
    """

    made: Sequence[Tensor]
    known: Sequence[Tensor | None]
    groups: Tensor
    topk: int

    @classmethod
    def create(
        cls, requests: int, shape: TreeShape, *, device: torch.device
    ) -> _LevelPlaces:
        k, levels = shape.topk, range(1, shape.num_steps - 1)
        first = torch.arange(requests, device=device)[:, None] * shape.num_groups
        branches = torch.arange(k, device=device)
        made = [(first + 1 + k * (level - 1) + branches).view(-1) for level in levels]
        known = [each if k == 1 else None for each in made]
        return cls(
            made=[first.view(-1), *made][: shape.num_steps - 1],
            known=[first.view(-1).repeat_interleave(k), *known],
            groups=first + torch.arange(shape.num_candidates, device=device) // k,
            topk=k,
        )

    def followed(self, level: int, parents: Tensor) -> Tensor:
        """Return the places that the branches of a level continue from, [b * K].

        Args:
            parents: of the b requests (`DraftLevels`).
        """
        bs, k = len(parents), self.topk
        known = self.known[level]
        if known is not None:
            return known[: bs * k]
        chosen = parents[:, 1 + k * level : 1 + k * (level + 1)]
        return self.groups[:bs].gather(1, chosen).view(-1)
