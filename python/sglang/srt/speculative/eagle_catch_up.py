"""What lets a draft's KV pause while nothing is drafted, and catch up: extends over
known tokens, and the target's hidden states at those that plain steps computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sglang.srt.configs.draft_layout import CATCH_UP_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.draft_trees.relay import DraftRelay
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.tp_worker import SampledForward
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.speculative.eagle_draft_extend import DraftExtend

PLAIN_STATES_BYTES = 128 << 20
"""Memory for hidden states of plain steps, if `CATCH_UP_TOKENS` a request fit."""
MAX_BEHIND = 512
"""Most tokens that a draft's KV may lack. What it lacks at a request's end is not
cached."""


def most_behind(*, rows: int, bytes_per_token: int) -> int:
    """Return how many tokens of a request the draft's KV may lack.

    Args:
        rows: of requests. bytes_per_token: of hidden states; 0 if none are read.
    """
    if not bytes_per_token:
        return MAX_BEHIND
    fitting = PLAIN_STATES_BYTES // (rows * bytes_per_token)
    return min(max(fitting, CATCH_UP_TOKENS), MAX_BEHIND)


class PlainStates:
    """The target's newest hidden states of each request row, a ring by position.

    On a CPU every forward returns new tensors, so those of the newest steps wait and
    are only written when drafts resume, which they often do not. A graph on a GPU
    returns the same memory each time.

    Args:
        rows: request rows. length: positions that are kept.
    """

    def __init__(
        self,
        *,
        rows: int,
        length: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._length = length
        self._states = torch.zeros((rows * length, width), dtype=dtype, device=device)
        self._may_wait = self._states.device.type == "cpu"
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(self, rows: Tensor, positions: Tensor, states: Tensor) -> None:
        """Keep states [R, width] of request rows at positions, int64 [R] each; none of
        them may be written to later if they are on a CPU."""
        if not self._may_wait:
            self._states.index_copy_(0, self._places(rows, positions), states)
            return
        self._waiting.append((rows, positions, states))
        if len(self._waiting) == self._length:
            self._write()

    def _write(self) -> None:
        """Write what waits, oldest first: a later request may have the same place."""
        if not self._waiting:
            return
        rows, positions, states = zip(*self._waiting, strict=True)
        places = self._places(torch.cat(rows), torch.cat(positions))
        parts = places.split([len(each) for each in rows])
        for part, kept in zip(parts, states, strict=True):
            self._states.index_copy_(0, part, kept)
        self._waiting.clear()

    def take(self, rows: Tensor, positions: Tensor, *, out: Tensor) -> None:
        """Copy states of request rows, int64 [R], at positions, int64 [R, n], to `out`
        [R * n, width]; those that were not kept are meaningless."""
        self._write()
        places = self._places(rows[:, None], positions)
        torch.index_select(self._states, 0, places.view(-1), out=out)

    def _places(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows * self._length + positions % self._length


class CatchUp:
    """Extends a draft by tokens whose KV it lacks.

    Args:
        extends: of all shapes.
        token_table: int32 [request rows, positions], the requests' tokens.
        lead: `ServerArgs.draft_lead`.
        states: hidden states of plain steps; None if the draft reads none, or never
            pauses.
    """

    def __init__(
        self,
        extends: Sequence[DraftExtend],
        *,
        relay: DraftRelay,
        token_table: Tensor,
        lead: int,
        states: PlainStates | None,
    ) -> None:
        self._extends = sorted(extends, key=lambda each: each.width)
        self._relay = relay
        self._token_table = token_table
        self._lead = lead
        self._states = states

    def keep(self, done: SampledForward) -> None:
        """Keep the hidden states of a plain step."""
        if self._states is None:
            return
        batch, states = done.forward_batch, done.output.hidden_states
        assert states is not None
        self._states.keep(batch.req_pool_indices, batch.positions, states)

    def run(self, batch: ScheduleBatch) -> None:
        """As `Drafter.catch_up`: a draft with a lead reads the newest token once the
        request has a slot for it, and after plain steps a draft reads their tokens."""
        if batch.catch_up is None:
            return
        left = batch.catch_up.copy()
        most = self._extends[-1].width
        while len(rows := np.flatnonzero(left)):
            counts = np.minimum(left[rows], most)
            self._extend(batch, rows, behind=left[rows], counts=counts)
            left[rows] -= counts

    def _extend(
        self,
        batch: ScheduleBatch,
        rows: IntArray,
        *,
        behind: IntArray,
        counts: IntArray,
    ) -> None:
        """Extend the draft by tokens that are in the token table.

        Args:
            rows: of the batch, the others stay as they are.
            behind: int64 [len(rows)], tokens that the draft's KV lacks, of which it
                gets the first `counts`.
        """
        widest = int(counts.max())
        extend = next(each for each in self._extends if each.width >= widest)
        workspace, count = extend.workspace, len(rows)
        workspace.begin(batch.gather_identity(rows))
        # A graph's padding too, which has no KV.
        views = workspace.rows(workspace.max_rows)
        idx, lens = views.identity[0], views.draft_lens
        missing, gained = batch.upload(np.stack((behind, counts))).unbind()
        views.result.accept_lens.fill_(1)
        views.result.accept_lens[:count] = gained
        torch.add(self._relay.seq_lens.index_select(0, idx), self._lead, out=lens)
        lens[:count] -= missing
        lens[count:].zero_()
        workspace.place_extends(views)
        positions = lens[:, None] + workspace.path_steps()
        columns = positions if self._lead else positions + 1
        views.tokens.copy_(self._token_table[idx[:, None], columns])
        if self._states is not None:
            states = workspace.rows(count).hidden_states
            assert states is not None
            self._states.take(idx[:count], positions[:count], out=states)
        known = batch.known_lens()
        if known is not None:
            lead = self._lead - behind
            known = [known[row] + int(n) for row, n in zip(rows, lead, strict=True)]
        extend.run(count, seq_lens=known)
