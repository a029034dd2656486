"""The check of what a draft hands on beside its KV: from iteration to iteration through
the relay, from level to level of a tree, from a verification to the extend after it,
from an extend to its head.

Sums are noted from what was computed and compared with what is about to be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.carried import CandidateGroups, CarriedRows, CarriedState
from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.kv_canary.kernels import carry

if TYPE_CHECKING:
    from kv_canary.state import CanaryState
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.draft_trees.buffers import DraftCandidates
    from sglang.srt.draft_trees.workspace import WorkspaceRows
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.logits_processor import HeadCall


class DraftState:
    """The sums of one draft worker. Each method is one launch.

    Args:
        state: of the draft's pool.
        max_requests: requests of the largest batch; the request table has one more row.
        shape: of the trees.
        of_requests: sums of what iterations start from, shared by the checks of all
            shapes of a worker; None for its first one.
    """

    def __init__(
        self,
        state: CanaryState,
        *,
        max_requests: int,
        shape: TreeShape,
        of_requests: Tensor | None = None,
    ) -> None:
        self._state = state
        if of_requests is None:
            of_requests = state.counters.new_zeros(max_requests + 1)
        self._of_requests = of_requests
        self._of_groups = state.counters.new_zeros(max_requests * shape.num_groups)
        self._levels = _LevelPlaces.create(
            max_requests, shape, device=state.counters.device
        )

    def for_shape(self, shape: TreeShape, *, max_requests: int) -> DraftState:
        """The check of the same worker's trees of another shape."""
        return DraftState(
            self._state,
            max_requests=max_requests,
            shape=shape,
            of_requests=self._of_requests,
        )

    def on_extend(
        self,
        forward_batch: ForwardBatch,
        head: HeadCall,
        candidates: DraftCandidates,
        hidden: Tensor | None,
    ) -> None:
        """Check the rows that the head of an extend read, one per request: of its last
        token, or of the last accepted one. Note what the requests' next iterations
        start from, before it is stashed."""
        offsets, lens = forward_batch.qo_indptr, forward_batch.extend_lens
        assert offsets is not None
        if forward_batch.forward_mode is ForwardMode.DRAFT_EXTEND_V2:
            given = forward_batch.spec_info
            assert isinstance(given, EagleDraftInput) and given.accept_lens is not None
            lens = given.accept_lens
        carried = CarriedState(
            req_rows=forward_batch.req_pool_indices,
            serials=forward_batch.req_serial,
            positions=forward_batch.prefix_lens,
            checked=CarriedRows(
                places=offsets[:-1, None],
                lens=lens,
                hidden=head.inputs,
                source=head.hidden,
            ),
            noted=self._of(forward_batch.req_pool_indices, candidates, hidden),
            clock_offset=-1,
        )
        carry(self._state, carried)

    def on_gather(
        self, live: WorkspaceRows, candidates: DraftCandidates, hidden: Tensor | None
    ) -> None:
        """Check what an iteration starts from, and note it as level 0 of the tree."""
        start = self._of(live.identity[0], candidates, hidden)
        self._carry(live, checked=start, noted=self._of_level(live, 0, hidden))

    def on_step(
        self, live: WorkspaceRows, level: int, read: Tensor | None, made: Tensor | None
    ) -> None:
        """Check the hidden states that draft step `level` has read, one per branch, by
        the candidates that `select_top_k` chose. Note the ones that it made if another
        step follows."""
        if read is None:
            return
        checked = CarriedRows(
            places=self._levels.followed(level, live.levels.parents),
            groups=self._levels.groups[level],
            hidden=read,
            sums=self._of_groups,
        )
        noted = self._of_level(live, level + 1, made)
        self._carry(live, checked=checked, noted=noted, clock_offset=-1)

    def on_take(self, live: WorkspaceRows, hidden: Tensor) -> None:
        """Check the hidden states of the accepted nodes, by what was accepted.

        Args:
            hidden: the target's, of all nodes, [b * D, width].
        """
        assert live.hidden_states is not None
        checked = CarriedRows(
            places=live.result.accept_index, hidden=live.hidden_states, source=hidden
        )
        self._carry(live, checked=checked)

    def _of(
        self, req_rows: Tensor, candidates: DraftCandidates, hidden: Tensor | None
    ) -> CarriedRows:
        return CarriedRows(
            places=req_rows[:, None],
            hidden=hidden,
            ids=candidates.ids,
            probs=candidates.probs,
            sums=self._of_requests,
        )

    def _of_level(
        self, live: WorkspaceRows, level: int, hidden: Tensor | None
    ) -> CarriedRows | None:
        """Return the hidden states that propose a level's candidates: one per request
        at level 0, then one per branch. None if no step reads them."""
        if hidden is None or level == len(self._levels.made):
            return None
        places = self._levels.made[level][: live.bs]
        return CarriedRows(places=places, hidden=hidden, sums=self._of_groups)

    def _carry(
        self,
        live: WorkspaceRows,
        *,
        checked: CarriedRows,
        noted: CarriedRows | None = None,
        clock_offset: int = 0,
    ) -> None:
        carried = CarriedState(
            req_rows=live.identity[0],
            serials=live.identity[1],
            positions=live.seq_lens,
            checked=checked,
            noted=noted,
            clock_offset=clock_offset,
        )
        carry(self._state, carried)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LevelPlaces:
    """Places of hidden states between the levels of a tree, for n requests.

    A hidden state proposes one group of K candidates, so candidate c of a request
    continues from the state of group c // K (`DraftLevels`).

    Fields:
        made: for each level but the last int64 [n, 1] or [n, K], the groups that
            propose its candidates.
        known: for each of them int64 [n, K], the groups that its branches continue
            from; None if only the parents say so.
        groups: for each of them how parents become groups, if so.
    """

    made: Sequence[Tensor]
    known: Sequence[Tensor | None]
    groups: Sequence[CandidateGroups | None]

    @classmethod
    def create(
        cls, requests: int, shape: TreeShape, *, device: torch.device
    ) -> _LevelPlaces:
        k, levels = shape.topk, range(1, shape.num_steps - 1)
        first = torch.arange(requests, device=device)[:, None] * shape.num_groups
        branches = torch.arange(k, device=device)
        made = [first + 1 + k * (level - 1) + branches for level in levels]
        known = [first.repeat(1, k), *(each if k == 1 else None for each in made)]
        groups = CandidateGroups(shape.num_groups, k)
        return cls(
            made=[first, *made][: shape.num_steps - 1],
            known=known,
            groups=[groups if each is None else None for each in known],
        )

    def followed(self, level: int, parents: Tensor) -> Tensor:
        """Return where the branches of a level continue from, int64 [b, K]: groups, or
        candidates if the level has `groups`.

        Args:
            parents: of the b requests (`DraftLevels`).
        """
        known = self.known[level]
        if known is not None:
            return known[: len(parents)]
        k = (parents.shape[1] - 1) // len(self.made)
        return parents[:, 1 + k * level : 1 + k * (level + 1)]
