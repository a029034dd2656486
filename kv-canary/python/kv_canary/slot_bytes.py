"""Fingerprints of slots whose bytes lie anywhere in the pages of a pool.

`layout.Fingerprint` views a pool whose slots are runs of bytes, as kernels need it. An
engine may keep one allocation per layer, K beside V, or a slot's values scattered over
its page. `SlotBytes` gathers them by offsets: in torch, on any device, without waiting
for it. A forward's launches then run without fingerprints of their own, between
`mark_new` and `note_new`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.checks import Reason
from kv_canary.hashing import mix64
from kv_canary.kernels.reference.report import Report, flag
from kv_canary.kernels.reference.rows import load_slots
from kv_canary.layout import CHUNK_BYTES, FingerprintMode
from kv_canary.records import (
    CLOCK_MASK,
    CLOCK_SHIFT,
    POISON_WORD,
    SENTINEL,
    TOKEN_MASK,
    Launch,
    Record,
    Ring,
    fingerprint_keys,
    pack_word0_tensor,
    sample_place,
)
from kv_canary.span import memory_span
from kv_canary.view import NO_MANAGER, ForwardView, KVReadView

if TYPE_CHECKING:
    from kv_canary.state import CanaryState

_WORD_BYTES = torch.int64.itemsize
_WORDS_PER_CHUNK = CHUNK_BYTES // _WORD_BYTES
# Values gathered at once if all bytes are covered.
_SLOTS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Where the values of a page's slots lie; the same for all layers of a group.

    Fields:
        page_stride: values from one page to the next.
        k, v: int64 [page_size, n], offsets of a slot's values from the page's first
            value.
    """

    page_stride: int
    k: Tensor
    v: Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteFindings:
    """The result of a check of bytes, still on the device.

    Fields:
        count: int64 [], number of findings.
        columns: columns of the ring, [n] each; reasons are 0 if nothing is wrong.
        launch: the launch to name.
    """

    count: Tensor
    columns: dict[Ring, Tensor]
    launch: Launch

    def report(self, state: CanaryState, *, clock_offset: int = 0) -> None:
        """Append them to the ring. Waits for the device.

        Args:
            clock_offset: from the clock now to the forward that found them.
        """
        report = Report(state, self.launch, NO_MANAGER, clock_offset=clock_offset)
        report.add(self.columns)


class SlotBytes:
    """The bytes of a group of layers, by slot.

    Args:
        layers: a tensor per layer, of any shape, that begins with page 0; all of one
            dtype and device. Kept alive.
        mode: what a fingerprint covers, PARTIAL or ALL.

    Raises:
        ValueError: the layers or offsets are impossible, or do not form whole chunks.
    """

    def __init__(
        self, layers: Sequence[Tensor], layout: PageLayout, mode: FingerprintMode
    ) -> None:
        if mode not in (FingerprintMode.PARTIAL, FingerprintMode.ALL):
            raise ValueError(f"SlotBytes: mode {mode.name.lower()}; use partial or all")
        first, size = layers[0], layers[0].element_size()
        for half in (layout.k, layout.v):
            if half.shape[1] == 0 or half.shape[1] * size % CHUNK_BYTES:
                raise ValueError(
                    f"SlotBytes: a slot has {half.shape[1]} values of {size} bytes per "
                    f"layer; the canary fingerprints runs of {CHUNK_BYTES} bytes"
                )
        if layout.k.shape != layout.v.shape:
            raise ValueError(
                f"SlotBytes: K has offsets {list(layout.k.shape)}, V "
                f"{list(layout.v.shape)}"
            )
        self._layers = list(layers)
        self._mode = mode
        self._layout = layout
        device = first.device
        self._halves = (layout.k.to(device), layout.v.to(device))
        self._flat, begin = memory_span(layers)
        bases = [layer.data_ptr() - begin for layer in layers]
        if any(base % size for base in bases):
            raise ValueError(f"SlotBytes: layers at {bases} bytes, values of {size}")
        self._bases = torch.tensor([base // size for base in bases], device=device)
        self._per_chunk = CHUNK_BYTES // size
        self._num_chunks = layout.k.shape[1] // self._per_chunk
        pattern = torch.tensor([SENTINEL, SENTINEL], device=device)
        self._sentinel = pattern.view(self._flat.dtype)

    def fingerprints(self, slots: Tensor, lineages: Tensor) -> Tensor:
        """Return fingerprints [n] of slots [n] whose records have these lineages."""
        sums = self._sampled if self._mode is FingerprintMode.PARTIAL else self._whole
        low, high = (sums(half, slots, lineages) for half in self._halves)
        return (low & TOKEN_MASK) | (high << 32)

    def mark_new(self, state: CanaryState, view: ForwardView) -> None:
        """Make a missing store show. Call it after the head records, before the
        model."""
        slots, is_new = self._new_slots(state, view)
        lineages = state.head[slots, Record.LINEAGE]
        for half in self._halves:
            index = self._sample_index(half, slots, lineages)
            values = torch.where(is_new[:, None], self._sentinel, self._flat[index])
            self._flat.index_put_((index,), values)

    def note_new(self, state: CanaryState, view: ForwardView) -> ByteFindings:
        """Put fingerprints of the new tokens' slots into their records, after
        `write_tail`. Finds slots that were not stored."""
        slots, is_new = self._new_slots(state, view)
        lineages = state.tail[slots, Record.LINEAGE]
        missing = torch.zeros_like(is_new)
        for half in self._halves:
            found = self._flat[self._sample_index(half, slots, lineages)]
            missing |= (found == self._sentinel).all(dim=1)
        old = state.tail[slots, Record.FINGERPRINT]
        new = torch.where(is_new, self.fingerprints(slots, lineages), old)
        state.tail[:, Record.FINGERPRINT].index_copy_(0, slots, new)
        missing &= is_new
        row = _rows_of_tokens(view)
        record = state.tail[slots]
        return ByteFindings(
            count=missing.sum(),
            launch=Launch.TAIL,
            columns={
                Ring.REASONS: flag(Reason.WRITE_MISSING, missing),
                Ring.REQ_ROW: view.req_rows[row],
                Ring.SERIAL: view.serials[row],
                Ring.SLOT: slots,
                Ring.POSITION: view.positions,
                Ring.EXPECTED_WORD0: record[:, Record.WORD0],
                Ring.FOUND_WORD0: record[:, Record.WORD0],
                Ring.EXPECTED_LINEAGE: lineages,
                Ring.FOUND_LINEAGE: lineages,
                Ring.FOUND_WORD3: record[:, Record.WORD3],
                Ring.BATCH_ROW: row,
            },
        )

    def check(
        self, state: CanaryState, view: ForwardView, table: KVReadView, *, total: int
    ) -> ByteFindings:
        """Compare the bytes of `table`'s prefix elements with their records. Slots that
        this forward writes are left out, because their bytes are still to come.

        Args:
            total: prefix elements of all rows, known to the host.
        """
        first = table.first_position
        if first is None:
            first = torch.zeros_like(view.prefix_lens)
        lens = torch.minimum(first + table.read_lens, view.prefix_lens) - first
        lens = lens.clamp(min=0) * (view.req_rows != 0)
        # An extra row takes what a shortened table leaves of the host's total.
        spare = (total - lens.sum()).clamp(min=0)[None]
        row = torch.repeat_interleave(torch.cat((lens, spare)), output_size=total)
        is_row = row < len(lens)
        row = row * is_row
        element = torch.arange(total, device=row.device) - (lens.cumsum(0) - lens)[row]
        slot = load_slots(table, row, element * is_row)
        readable = is_row & (slot >= self._layout.page_size) & (slot < state.num_slots)
        slot = slot * readable
        record = state.tail[slot]
        written = (record[:, Record.WORD3] >> CLOCK_SHIFT) & CLOCK_MASK
        due = readable & (record[:, Record.WORD0] != POISON_WORD)
        due &= written != (state.clock & CLOCK_MASK)
        position = first[row] + element
        bad, compared = self._compared(slot, record, due)
        return ByteFindings(
            count=bad.sum(),
            launch=Launch.VERIFY,
            columns={
                **compared,
                Ring.REQ_ROW: view.req_rows[row],
                Ring.SERIAL: view.serials[row],
                Ring.POSITION: position,
                Ring.EXPECTED_WORD0: pack_word0_tensor(-torch.ones_like(row), position),
                Ring.BATCH_ROW: row,
                Ring.EXPECTED_SLOT: slot,
            },
        )

    def check_slots(self, state: CanaryState, slots: Tensor) -> ByteFindings:
        """Compare the bytes of slots [n] int64, which no forward reads, with their
        records. Poisoned slots have none."""
        record = state.tail[slots]
        due = record[:, Record.WORD0] != POISON_WORD
        bad, compared = self._compared(slots, record, due)
        return ByteFindings(
            count=bad.sum(),
            launch=Launch.SWEEP,
            columns={
                **compared,
                Ring.POSITION: record[:, Record.WORD0] >> 32,
                Ring.EXPECTED_WORD0: record[:, Record.WORD0],
            },
        )

    def _compared(
        self, slots: Tensor, record: Tensor, due: Tensor
    ) -> tuple[Tensor, dict[Ring, Tensor]]:
        """Return (bool [n], bytes that differ from their record; the columns that say
        so).

        Args:
            record: records of the slots, [n, words]. due: slots whose bytes count.
        """
        lineages = record[:, Record.LINEAGE]
        found = self.fingerprints(slots, lineages)
        bad = due & (found != record[:, Record.FINGERPRINT])
        return bad, {
            Ring.REASONS: flag(Reason.VERIFY_REAL_KV, bad),
            Ring.SLOT: slots,
            Ring.FOUND_WORD0: record[:, Record.WORD0],
            # Verify compares it; here it says which bytes are sampled.
            Ring.EXPECTED_LINEAGE: lineages,
            Ring.FOUND_LINEAGE: lineages,
            Ring.FOUND_WORD3: record[:, Record.WORD3],
            Ring.FOUND_FINGERPRINT: record[:, Record.FINGERPRINT],
            Ring.COMPUTED_FINGERPRINT: found,
        }

    def flip(self, slot: int, lineage: int) -> None:
        """Flip a bit of K of `slot` inside the sample of a record with this lineage, to
        plant a fault."""
        of = torch.tensor([slot], device=self._flat.device)
        index = self._sample_index(
            self._halves[0], of, torch.full_like(of, lineage)
        ).view(-1)[0]
        self._flat[index] ^= 1

    def _new_slots(
        self, state: CanaryState, view: ForwardView
    ) -> tuple[Tensor, Tensor]:
        """Return (slots [T], 0 if nothing is recorded; whether it is)."""
        slots = view.out_cache_loc
        is_new = (slots >= self._layout.page_size) & (slots < state.num_slots)
        return slots * is_new, is_new

    def _index(self, layer: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
        page = slots // self._layout.page_size
        return (self._bases[layer] + page * self._layout.page_stride)[:, None] + offsets

    def _sample_index(self, half: Tensor, slots: Tensor, lineages: Tensor) -> Tensor:
        """Return places of the sampled values, [n, values of a chunk]."""
        layer, chunk = sample_place(
            lineages, layers=len(self._layers), chunks=self._num_chunks
        )
        steps = torch.arange(self._per_chunk, device=slots.device)
        values = chunk[:, None] * self._per_chunk + steps
        offset = (slots % self._layout.page_size)[:, None]
        return self._index(layer, slots, half[offset, values])

    def _sampled(self, half: Tensor, slots: Tensor, lineages: Tensor) -> Tensor:
        layer, chunk = sample_place(
            lineages, layers=len(self._layers), chunks=self._num_chunks
        )
        values = self._flat[self._sample_index(half, slots, lineages)]
        steps = torch.arange(_WORDS_PER_CHUNK, device=slots.device)
        keys = fingerprint_keys(
            layer[:, None], chunk[:, None] * _WORDS_PER_CHUNK + steps
        )
        return mix64(values.view(torch.int64) ^ keys).sum(dim=1)

    def _whole(self, half: Tensor, slots: Tensor, lineages: Tensor) -> Tensor:
        sums = torch.zeros_like(slots)
        for begin in range(0, len(slots), _SLOTS_AT_ONCE):
            some = slots[begin : begin + _SLOTS_AT_ONCE]
            offsets = half[some % self._layout.page_size]
            for number in range(len(self._layers)):
                layer = torch.full_like(some, number)
                values = self._flat[self._index(layer, some, offsets)]
                words = values.view(torch.int64)
                steps = torch.arange(words.shape[1], device=slots.device)
                keys = fingerprint_keys(layer[:1], steps)
                sums[begin : begin + _SLOTS_AT_ONCE] += mix64(words ^ keys).sum(dim=1)
        return sums


def _rows_of_tokens(view: ForwardView) -> Tensor:
    """Return batch rows [T] of new tokens; tokens after the last row count to it."""
    place = torch.arange(view.num_tokens, device=view.positions.device)
    if view.qo_indptr is None:
        return place
    row = torch.searchsorted(view.qo_indptr, place, right=True) - 1
    return row.clamp(max=view.num_rows - 1)
