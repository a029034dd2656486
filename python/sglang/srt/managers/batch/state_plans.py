"""Decides which checkpoints of recurrent state a batch restores and takes.

Checkpoints are taken where requests will ask for them: at the end of a prompt, rounded
down; where the prompt leaves what other requests have cached; at the end of a chunk;
and every so many tokens while a request decodes, also with drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.forward.state_plan import DueCheckpoints, StateCopies, StatePlan
from sglang.srt.layers.ops.state.shared.tracks import CHUNK
from sglang.srt.mem_cache.groups.saved_states import HeldCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.mem_cache.base_prefix_cache import CacheableReq
    from sglang.srt.mem_cache.groups.state_runs import StateRuns
    from sglang.srt.mem_cache.page_ledger import IntArray

TRACKS = 2
"""Checkpoints of a row in one prefill: the end, and where it branches off."""

Upload = Callable[["IntArray"], "Tensor"]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpan:
    """The part of a request's prompt that is prefilled now: positions [start, end).

    Fields:
        is_new: whether its row holds no state yet.
        is_last: whether the prompt ends here.
    """

    req: CacheableReq
    start: int
    end: int
    is_new: bool
    is_last: bool


class StatePlanner:
    """Plans the copies of each batch.

    Args:
        runs: checkpoints of the prefix cache.
        interval: decoded tokens between two checkpoints of a request, a multiple of the
            page size; 0 for none.
        ahead: the most tokens by which a verification may end after those that the host
            knows when it is launched; 0 without drafts. At most `interval`.
        tracks_inside: whether a prefill also takes checkpoints before its end.
        chunk: tokens after which the kernels of a prefill can store a state.
    """

    def __init__(
        self,
        runs: StateRuns,
        *,
        page_size: int,
        interval: int,
        tracks_inside: bool,
        ahead: int = 0,
        chunk: int = CHUNK,
    ) -> None:
        if interval and ahead > interval:
            raise ValueError(
                f"--mamba-track-interval {interval}: a verification of drafts and the "
                f"one in flight before it may accept {ahead} tokens, and would reach "
                f"two checkpoints; use at least {-(-ahead // page_size) * page_size}, "
                "fewer --speculative-num-steps, or --mamba-radix-cache-strategy "
                "no_buffer instead, for none"
            )
        self._runs = runs
        self._page_size = page_size
        self._interval = interval
        self._ahead = ahead
        self._tracks_inside = tracks_inside
        self._grid = lcm(chunk, page_size)

    def for_prefill(
        self, spans: Sequence[PrefillSpan], upload: Upload
    ) -> StatePlan | None:
        restore = [
            (span.req.req_pool_idx, slot)
            for span in spans
            if span.is_new and (slot := self._cached_slot(span.req))
        ]
        kept = {slot for _, slot in restore}
        lens = np.zeros((len(spans), TRACKS), dtype=np.int64)
        slots = np.zeros_like(lens)
        for row, span in enumerate(spans):
            for column, length in enumerate(self._lengths(span)):
                slot = self._runs.take(kept)
                if slot:
                    held = HeldCheckpoint(span.start + length, slot)
                    self._runs.hold_of(span.req.holds).tracked.append(held)
                    lens[row, column], slots[row, column] = length, slot
        if not restore and not lens.any():
            return None
        tracks = upload(np.stack([lens, slots])) if lens.any() else None
        return StatePlan(
            restore=_copies(restore, upload),
            track_lens=None if tracks is None else tracks[0],
            track_slots=None if tracks is None else tracks[1],
        )

    def for_decode(
        self, reqs: Sequence[CacheableReq], ends: IntArray, upload: Upload
    ) -> StatePlan | None:
        """Plan a decode step after which `ends` tokens of each request are folded."""
        if not self._interval:
            return None
        save = []
        for row in np.flatnonzero(ends % self._interval == 0).tolist():
            req = reqs[row]
            if req.no_cache:
                continue
            hold = self._runs.hold_of(req.holds)
            if hold.saved is not None:
                self._runs.slots.give(hold.saved.slot)
                hold.saved = None
            slot = self._runs.take()
            if slot:
                hold.saved = HeldCheckpoint(int(ends[row]), slot)
                save.append((slot, req.req_pool_idx))
        return StatePlan(save=_copies(save, upload)) if save else None

    def for_verification(
        self, reqs: Sequence[CacheableReq], known: IntArray, upload: Upload
    ) -> StatePlan | None:
        """Plan a verification of drafts.

        Args:
            known: tokens of each request that the host knows to be folded.
        """
        if not self._interval:
            return None
        due = known - known % self._interval + self._interval
        found = []
        for row in np.flatnonzero(due <= known + self._ahead).tolist():
            req, end = reqs[row], int(due[row])
            if req.no_cache:
                continue
            slot = self._runs.reserve(self._runs.hold_of(req.holds), end)
            if slot:
                found.append((row, end, slot))
        if not found:
            return None
        rows, ends, slots = upload(np.array(found, dtype=np.int64).T)
        return StatePlan(due=DueCheckpoints(rows=rows, ends=ends, slots=slots))

    def _cached_slot(self, req: CacheableReq) -> int:
        if not req.cache_protected_len:
            return 0
        assert req.last_node is not None
        return self._runs.slot_at(req.last_node)

    def _lengths(self, span: PrefillSpan) -> list[int]:
        """Return how many new tokens are folded at each checkpoint, ascending."""
        if span.req.no_cache:
            return []
        count, is_aligned = span.end - span.start, span.end % self._page_size == 0
        if not self._tracks_inside:
            return [count] if is_aligned else []
        if span.start % self._page_size:
            return []
        # A match leaves the last token of a prompt to be computed.
        ends = [self._on_grid(count - 1) if span.is_last else count * is_aligned]
        if span.start < span.req.branch_len < span.end:
            ends.append(self._on_grid(span.req.branch_len - span.start))
        return sorted({length for length in ends if length})

    def _on_grid(self, length: int) -> int:
        return length - length % self._grid


def _copies(pairs: Sequence[Pair], upload: Upload) -> StateCopies | None:
    """Return copies of (dst, src)."""
    if not pairs:
        return None
    both = upload(np.array(pairs, dtype=np.int64).T)
    return StateCopies(dst=both[0], src=both[1])
