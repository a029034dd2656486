"""Checks of the bytes of slots that lie anywhere in the pages of a pool.

A forward's launches run without fingerprints of their own, between `mark_new` and
`note_new`, and the reads of its attention are compared between `read` and
`ByteReads.finish`. All of it runs on any device, without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kv_canary.checks import Reason
from kv_canary.hashing import mix64
from kv_canary.kernels.reference.report import Report, flag
from kv_canary.kernels.reference.rows import load_slots
from kv_canary.layer_sums import LayerSums
from kv_canary.layout import FingerprintMode
from kv_canary.records import (
    CLOCK_MASK,
    CLOCK_SHIFT,
    POISON_WORD,
    TOKEN_MASK,
    Counter,
    Launch,
    Record,
    Ring,
    fingerprint_keys,
    pack_word0_tensor,
)
from kv_canary.runtime.uploads import upload
from kv_canary.slot_places import WORDS_PER_CHUNK, PageLayout, SlotPlaces
from kv_canary.view import NO_MANAGER, ForwardView, KVReadView

if TYPE_CHECKING:
    from kv_canary.state import CanaryState

_OF_LAYERS = (FingerprintMode.ROTATE, FingerprintMode.ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteFindings:
    """The result of a check of bytes, still on the device.

    Fields:
        count: int64 [], number of findings.
        make_columns: makes columns of the ring, [n] each; reasons are 0 if nothing is
            wrong. Rarely called.
        launch: the launch to name.
    """

    count: Tensor
    make_columns: Callable[[], dict[Ring, Tensor]]
    launch: Launch

    @classmethod
    def of(
        cls,
        bad: Tensor,
        launch: Launch,
        make_columns: Callable[[], dict[Ring, Tensor]],
    ) -> ByteFindings:
        """Return the findings of a check, where `bad` [n]. They may be reported later:
        columns are made of tensors that belong to this check."""
        return cls(count=bad.sum(), make_columns=make_columns, launch=launch)

    def report(self, state: CanaryState, *, clock_offset: int = 0) -> None:
        """Append them to the ring. Waits for the device.

        Args:
            clock_offset: from the clock now to the forward that found them.
        """
        report = Report(state, self.launch, NO_MANAGER, clock_offset=clock_offset)
        report.add(self.make_columns())


class _Compared(NamedTuple):
    """Fingerprints of slots, [n] each: which differ, as recorded, and as they are."""

    bad: Tensor
    kept: Tensor
    computed: Tensor


class _Elements(NamedTuple):
    """What attention reads of a forward's prefixes, [n] each.

    Fields:
        row: row of the batch. position: of the token.
        slot: where it is read. record: the tail record there, [n, words].
        due: whether the slot's bytes count.
    """

    row: Tensor
    position: Tensor
    slot: Tensor
    record: Tensor
    due: Tensor


class _Marks(NamedTuple):
    """The marks in the new tokens' slots.

    Fields:
        slots: [T], 0 if nothing is recorded. is_new: [T], whether it is.
        places: [T, values of K's mark and of V's], indices of `SlotPlaces.flat`.
    """

    slots: Tensor
    is_new: Tensor
    places: Tensor


class ByteReads:
    """The bytes that one forward reads, compared by layer until `finish`.

    Args:
        layers: numbers of the layers to compare.
        compared: what was compared already, if anything.

    Attributes:
        due: layers that are still to be compared.
    """

    def __init__(
        self,
        state: CanaryState,
        view: ForwardView,
        elements: _Elements,
        compared: _Compared | None,
        sums: LayerSums | None,
        layers: Sequence[int] = (),
    ) -> None:
        self._state = state
        self._view = view
        self._elements = elements
        self._compared = compared
        self._sums = sums
        self.due = list(layers)

    def compare(self, layer: int) -> None:
        """Compare a layer now, as its attention is about to read it."""
        assert self._sums is not None
        self.due.remove(layer)
        slot = self._elements.slot
        computed = self._sums.compute(slot, layer)[:, 0]
        kept = self._sums.kept[slot, layer]
        bad = self._elements.due & (computed != kept)
        named = [self._sums.named(sums, layer) for sums in (kept, computed)]
        first = self._compared
        if first is None:
            self._compared = _Compared(bad, *named)
            return
        # A slot that is damaged in several layers is reported for the first one.
        is_first = bad & ~first.bad
        self._compared = _Compared(
            first.bad | bad,
            torch.where(is_first, named[0], first.kept),
            torch.where(is_first, named[1], first.computed),
        )

    def compare_rest(self) -> None:
        """Compare the layers that are still due."""
        for layer in tuple(self.due):
            self.compare(layer)

    def finish(self) -> ByteFindings:
        """Compare what is left, and return the findings."""
        self.compare_rest()
        row, position, slot, record, due = self._elements
        if self._sums is not None:
            self._state.counters[Counter.REHASHED_SLOTS] += due.sum()
        compared, view = self._compared, self._view
        assert compared is not None
        return ByteFindings.of(
            compared.bad,
            Launch.VERIFY if self._sums is None else Launch.ATTENTION,
            lambda: {
                **_columns(slot, record, compared),
                Ring.REQ_ROW: view.req_rows[row],
                Ring.SERIAL: view.serials[row],
                Ring.POSITION: position,
                Ring.EXPECTED_WORD0: pack_word0_tensor(-torch.ones_like(row), position),
                Ring.BATCH_ROW: row,
                Ring.EXPECTED_SLOT: slot,
            },
        )


class SlotBytes:
    """The bytes of a group of layers, by slot.

    Args:
        layers: a tensor per layer, of any shape, that begins with page 0; all of one
            dtype and device. Kept alive.
        mode: PARTIAL compares 16 bytes of K and of V in one layer on every read.
            ROTATE compares all bytes of one layer, another one in each forward; ALL
            those of all layers.
        num_slots: slots of the group, including the scratch page.
        numbers: names of the layers in reports; 0, 1, ... by default.

    Raises:
        ValueError: the layers or offsets are impossible, or do not form whole chunks.

    Attributes:
        num_layers: number of layers.
    """

    def __init__(
        self,
        layers: Sequence[Tensor],
        layout: PageLayout,
        mode: FingerprintMode,
        *,
        num_slots: int,
        numbers: Sequence[int] = (),
    ) -> None:
        if mode is FingerprintMode.NONE:
            raise ValueError("SlotBytes: mode none; use partial, rotate or all")
        self._places = places = SlotPlaces(layers, layout)
        self._rotates = mode is FingerprintMode.ROTATE
        self._sums: LayerSums | None = None
        if mode in _OF_LAYERS:
            self._sums = LayerSums(places, num_slots=num_slots, numbers=numbers)
        self.num_layers = places.num_layers
        self._turn = 0
        self._marks: _Marks | None = None

    @property
    def covers_all(self) -> bool:
        """Whether all bytes of a slot are compared, at least in turn."""
        return self._sums is not None

    # -- new tokens ----------------------------------------------------------------

    def mark_new(self, state: CanaryState, view: ForwardView) -> None:
        """Make a missing store show: mark 16 bytes of K and of V in a layer, the next
        ones in each forward. Call it before the model."""
        places = self._places
        slots = view.out_cache_loc
        is_new = (slots >= places.page_size) & (slots < state.num_slots)
        slots = slots * is_new
        index = places.marked_index(slots, self._turn)
        marked = torch.where(is_new[:, None], places.mark, places.flat[index])
        places.flat.index_put_((index,), marked)
        self._marks = _Marks(slots, is_new, index)
        self._turn += 1

    def note_new(self, state: CanaryState, view: ForwardView) -> ByteFindings:
        """Keep fingerprints of the new tokens' slots, after `write_tail`. Finds slots
        that were not stored."""
        places = self._places
        assert self._marks is not None
        (slots, is_new, index), self._marks = self._marks, None
        positions = view.positions.clone()  # the host's own buffer
        is_marked = places.flat[index] == places.mark
        missing = is_new & is_marked.unflatten(1, (2, -1)).all(dim=2).any(dim=1)
        record = state.tail[slots]
        lineages = record[:, Record.LINEAGE]
        if self._sums is not None:
            self._sums.keep(slots)
        else:
            old = record[:, Record.FINGERPRINT]
            new = torch.where(is_new, self._sampled(slots, lineages), old)
            state.tail[:, Record.FINGERPRINT].index_copy_(0, slots, new)

        def columns() -> dict[Ring, Tensor]:
            row = _rows_of_tokens(view)
            return {
                Ring.REASONS: flag(Reason.WRITE_MISSING, missing),
                Ring.REQ_ROW: view.req_rows[row],
                Ring.SERIAL: view.serials[row],
                Ring.SLOT: slots,
                Ring.POSITION: positions,
                Ring.EXPECTED_WORD0: record[:, Record.WORD0],
                Ring.FOUND_WORD0: record[:, Record.WORD0],
                Ring.EXPECTED_LINEAGE: lineages,
                Ring.FOUND_LINEAGE: lineages,
                Ring.FOUND_WORD3: record[:, Record.WORD3],
                Ring.BATCH_ROW: row,
            }

        return ByteFindings.of(missing, Launch.TAIL, columns)

    def keep(self, slots: Tensor) -> None:
        """Keep the sums of slots [n] int64 that something else than a model filled. For
        modes that cover all bytes."""
        assert self._sums is not None
        self._sums.keep(slots)

    def kept(self, slots: Tensor) -> Tensor:
        """Return the sums that are kept of slots [n], int64 [n, layers]. For modes that
        cover all bytes."""
        assert self._sums is not None
        return self._sums.kept.index_select(0, slots)

    def move(self, dst: Tensor, src: Tensor) -> None:
        """Note that the bytes of slots `src` were moved to `dst`, [n] int64 each."""
        if self._sums is not None:
            self._sums.move(dst, src)

    # -- reads ---------------------------------------------------------------------

    def read(
        self,
        state: CanaryState,
        view: ForwardView,
        table: KVReadView,
        *,
        counts: Sequence[int],
    ) -> ByteReads:
        """Begin to compare the bytes of `table`'s prefix elements. Slots that this
        forward writes are left out, because their bytes are still to come.

        Args:
            counts: prefix elements of each row, known to the host.
        """
        elements = self._elements(state, view, table, counts)
        if self._sums is None:
            compared = self._compare_samples(*elements[2:])
            return ByteReads(state, view, elements, compared, None)
        layers = range(self.num_layers)
        if self._rotates:
            turn = self._turn % self.num_layers
            layers = range(turn, turn + 1)
        return ByteReads(state, view, elements, None, self._sums, layers)

    def check_slots(self, state: CanaryState, slots: Tensor) -> ByteFindings:
        """Compare the bytes of slots [n] int64, which no forward reads, with their
        records. Poisoned slots have none."""
        record = state.tail[slots]
        due = record[:, Record.WORD0] != POISON_WORD
        if self._sums is None:
            compared = self._compare_samples(slots, record, due)
        else:
            computed, kept = self._sums.compute(slots), self._sums.kept[slots]
            differs = computed != kept
            layer = differs.int().argmax(dim=1)
            compared = _Compared(
                due & differs.any(dim=1),
                *(s.gather(1, layer[:, None])[:, 0] for s in (kept, computed)),
            )
        return ByteFindings.of(
            compared.bad,
            Launch.SWEEP,
            lambda: {
                **_columns(slots, record, compared),
                Ring.POSITION: record[:, Record.WORD0] >> 32,
                Ring.EXPECTED_WORD0: record[:, Record.WORD0],
            },
        )

    def find_sources(self, slots: Tensor) -> Tensor:
        """Return for each of slots [n] int64 another slot that its bytes were recorded
        for, or -1. Samples do not tell."""
        if self._sums is None:
            return torch.full_like(slots, -1)
        return self._sums.find_sources(slots)

    def flip(self, slot: int, lineage: int) -> None:
        """Flip a bit of K of `slot` inside the sample of a record with this lineage, to
        plant a fault."""
        flat = self._places.flat
        of = torch.tensor([slot], device=flat.device)
        at = self._places.sample_index(
            self._places.halves[0], of, torch.full_like(of, lineage)
        ).view(-1)[0]
        flat[at] ^= 1

    # -- details -------------------------------------------------------------------

    def _elements(
        self,
        state: CanaryState,
        view: ForwardView,
        table: KVReadView,
        counts: Sequence[int],
    ) -> _Elements:
        # Made on the device: a batch may read 100,000 slots, and has few rows.
        lens = upload(torch.tensor(counts), view.req_rows.device)
        total = sum(counts)
        row = torch.repeat_interleave(lens, output_size=total)
        first = (lens.cumsum(dim=0) - lens)[row]
        element = torch.arange(total, device=row.device) - first
        # Attention may be told to read less than the host knows of.
        is_read = element < table.read_lens[row]
        slot = load_slots(table, row, element)
        readable = is_read & (slot >= self._places.page_size) & (slot < state.num_slots)
        slot = slot * readable
        record = state.tail[slot]
        written = (record[:, Record.WORD3] >> CLOCK_SHIFT) & CLOCK_MASK
        due = readable & (record[:, Record.WORD0] != POISON_WORD)
        due &= written != (state.clock & CLOCK_MASK)
        position = element
        if table.first_position is not None:
            position = table.first_position[row] + element
        return _Elements(row, position, slot, record, due)

    def _compare_samples(self, slots: Tensor, record: Tensor, due: Tensor) -> _Compared:
        """Compare samples of slots [n] with their records [n, words], where due."""
        computed = self._sampled(slots, record[:, Record.LINEAGE])
        kept = record[:, Record.FINGERPRINT]
        return _Compared(due & (computed != kept), kept, computed)

    def _sampled(self, slots: Tensor, lineages: Tensor) -> Tensor:
        """Return fingerprints [n] of the samples of slots [n] whose records have these
        lineages."""
        places = self._places
        layer, chunk = places.sampled(slots, lineages)
        steps = torch.arange(WORDS_PER_CHUNK, device=slots.device)
        keys = fingerprint_keys(
            layer[:, None], chunk[:, None] * WORDS_PER_CHUNK + steps
        )
        low, high = (
            mix64(values.view(torch.int64) ^ keys).sum(dim=1)
            for values in (
                places.flat[places.sample_index(half, slots, lineages)]
                for half in places.halves
            )
        )
        return (low & TOKEN_MASK) | (high << 32)


def _columns(slots: Tensor, record: Tensor, compared: _Compared) -> dict[Ring, Tensor]:
    """Return the columns of the ring that say which bytes differ from their record."""
    lineages = record[:, Record.LINEAGE]
    return {
        Ring.REASONS: flag(Reason.VERIFY_REAL_KV, compared.bad),
        Ring.SLOT: slots,
        Ring.FOUND_WORD0: record[:, Record.WORD0],
        # Verify compares it; here it says which bytes are sampled.
        Ring.EXPECTED_LINEAGE: lineages,
        Ring.FOUND_LINEAGE: lineages,
        Ring.FOUND_WORD3: record[:, Record.WORD3],
        Ring.FOUND_FINGERPRINT: compared.kept,
        Ring.COMPUTED_FINGERPRINT: compared.computed,
    }


def _rows_of_tokens(view: ForwardView) -> Tensor:
    """Return batch rows [T] of new tokens; tokens after the last row count to it."""
    place = torch.arange(view.num_tokens, device=view.positions.device)
    if view.qo_indptr is None:
        return place
    row = torch.searchsorted(view.qo_indptr, place, right=True) - 1
    return row.clamp(max=view.num_rows - 1)
