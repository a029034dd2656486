"""The records of one KV group, and the launches over them.

A group is a set of slots with one lifetime: full attention, a sliding window, a latent.
It knows its slots and nothing of requests or of other groups. Hosts subclass it to add
their page map: which slots of the group hold the tokens of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.checks import Reason
from kv_canary.records import Ring
from kv_canary.runtime.uploads import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_canary.pool_checks import PoolChecks
    from kv_canary.reporter import SourceOf
    from kv_canary.slot_bytes import ByteFindings, ByteReads, SlotBytes
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView


class Entries(NamedTuple):
    """The entries of a ring; `dropped` counts the findings that did not fit."""

    entries: list[list[int]]
    dropped: int


class CanaryGroup:
    """Checks the slots of one KV group.

    Args:
        state: the group's records on the device.
        checks: the tables that every forward is compared with.
        seeds: int64 [req_rows], lineage of each row before position 0. None if every
            lineage starts at 0.
        slot_bytes: fingerprints of slots whose bytes the kernels cannot view. None if
            `checks` has the fingerprints, or nothing is fingerprinted.
        stamps_first: see `HostCapabilities.shares_new_slots`.

    Attributes:
        freed: slots freed since the last `settle`, int64 [n] each.
        compares_in_pass: whether the host calls `attend` as each layer's attention is
            about to read. Otherwise bytes are compared before the forward.
    """

    def __init__(
        self,
        *,
        state: CanaryState,
        checks: PoolChecks,
        seeds: Tensor | None = None,
        slot_bytes: SlotBytes | None = None,
        stamps_first: bool = False,
    ) -> None:
        self.state = state
        self.checks = checks
        self.seeds = seeds
        self.bytes = slot_bytes
        self.freed: list[Tensor] = []
        self._stamps_first = stamps_first
        self.compares_in_pass = False
        self._reading: ByteReads | None = None
        self._found: list[ByteFindings] = []
        self._device = state.head.device

    # -- slots ---------------------------------------------------------------------

    def free(self, slots: Tensor) -> None:
        """Remember freed slots, int64 [n]. `settle` poisons them before the next
        forward; from then on, a read before the next write is reported."""
        self.freed.append(slots)

    def move(self, dst: Tensor, src: Tensor) -> None:
        """Move the records of slots `src` to `dst`, int64 [n] each, after the bytes."""
        launches.move_records(self.state, dst=dst, src=src)
        sums = self.checks.fingerprint.sums
        if sums is not None:
            sums.index_copy_(0, dst, sums.index_select(0, src))
        if self.bytes is not None:
            self.bytes.move(dst, src)

    def settle(self) -> None:
        """Poison the freed slots, in stream order."""
        if not self.freed:
            return
        freed, self.freed = self.freed, []
        for part in freed:
            if part.is_cuda:
                # Made on the host's stream, and used on the forward's.
                part.record_stream(torch.cuda.current_stream())
        slots = freed[0] if len(freed) == 1 else torch.cat(freed)
        self.poison(upload(slots, self._device))

    def poison(self, slots: Tensor) -> None:
        """Mark freed slots, int64 [n] on the device."""
        launches.poison(self.state, slots)

    # -- rows ----------------------------------------------------------------------

    def expect(self, rows: Tensor, values: Tensor) -> None:
        """Announce rows; see `launches.expect_rows`."""
        launches.expect_rows(self.state, rows, values, self.seeds)

    def forget(self, rows: Tensor) -> None:
        """Clear the verdicts of request rows [n] int64, in stream order."""
        self.state.verdict[rows] = 0

    # -- forwards ------------------------------------------------------------------

    def before(
        self,
        view: ForwardView,
        checks: PoolChecks,
        *,
        verified: ForwardView | None = None,
        num_read: Sequence[int] | None = None,
    ) -> None:
        """Check the slots that a forward reads, and where it writes.

        Args:
            view: the forward in this group's slots.
            checks: `self.checks`, or a variant of them.
            verified: `view` without the rows whose reads are not verified. Only hosts
                that stamp first may leave rows out.
            num_read: prefix elements of each row of its `reads[0]`. None: counted here,
                which waits for the device. Only `bytes` needs it.
        """
        state, verified = self.state, view if verified is None else verified
        if self._stamps_first:
            launches.stamp(state, view, checks)
            for table in verified.reads:
                launches.verify(state, verified, checks, table, steps_phase=False)
        else:
            launches.before_model(state, view, checks)
        if self.bytes is not None:
            if num_read is None:
                num_read = _count_prefix(verified)
            self._found, self._reading = [], None
            if any(num_read):
                table = verified.reads[0]
                self._reading = self.bytes.read(state, verified, table, counts=num_read)
                if not self.compares_in_pass:
                    self._reading.compare_rest()
            self.bytes.mark_new(state, view)

    def attend(self, layer: int) -> None:
        """Compare the bytes of a layer that attention is about to read."""
        reading = self._reading
        if reading is not None and layer in reading.due:
            reading.compare(layer)

    def after(
        self, view: ForwardView, *, advance: bool, findings: Tensor | None = None
    ) -> None:
        """Record what the model stored; arguments as for `launches.write_tail`."""
        launches.write_tail(
            self.state, view, self.checks, advance=advance, findings=findings
        )
        if self._reading is not None:
            self._found.append(self._reading.finish())
            self._reading = None
        if self.bytes is not None:
            self._found.append(self.bytes.note_new(self.state, view))

    # -- findings ------------------------------------------------------------------

    def take_found(self) -> list[ByteFindings]:
        """Take the findings of `bytes` in the forward that ended last."""
        found, self._found = self._found, []
        return found

    def find_sources(self, entries: Sequence[Sequence[int]]) -> SourceOf:
        """Look up where the bytes come from that entries are about. Waits for the
        device."""
        slots = sorted(
            {e[Ring.SLOT] for e in entries if e[Ring.REASONS] & Reason.VERIFY_REAL_KV}
        )
        if self.bytes is None or not slots:
            return lambda slot: -1
        found = self.bytes.find_sources(torch.tensor(slots, device=self._device))
        sources = dict(zip(slots, found.tolist(), strict=True))
        return lambda slot: sources.get(slot, -1)

    def take_entries(self) -> Entries:
        """Empty the ring; waits for the device."""
        state = self.state
        count, capacity = int(state.ring_count.item()), state.ring.shape[0]
        entries: list[list[int]] = state.ring[: min(count, capacity)].tolist()
        state.ring_count.zero_()
        return Entries(entries, max(count - capacity, 0))


def _count_prefix(view: ForwardView) -> list[int]:
    """Return the prefix elements of each row of `view.reads[0]`. Waits for the
    device."""
    lens = view.prefix_lens * (view.req_rows != 0)
    first = view.reads[0].first_position
    if first is not None:
        lens = (lens - first).clamp(min=0)
    counts: list[int] = lens.tolist()
    return counts
