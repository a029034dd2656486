"""Copies units between slots and host memory, beside the forwards.

```
store   forward's stream: gather into a buffer   copy stream: buffer --> host
load    copy stream: host --> buffer   load stream: scatter, compare, verdict --> host
```
A gather runs in stream order with the forwards, so a slot may be freed and taken again
at once. A load fills slots that nobody reads before its verdict is known; two buffers
take turns, so that one is filled while the other is scattered. On the CPU every step is
done when the call returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sglang.srt.kv_tiers.group import TierGroup

BUFFER_BYTES = 32 << 20
"""Bytes of units that are moved at once; one unit, if that is larger."""
MOST_STORED_AT_ONCE = 4 * BUFFER_BYTES
"""Bytes that may be on their way to the host, unless more are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """Units of one group and where their rows go. n units, k filled slots.

    Fields:
        group: their group.
        units: n tensors uint8 [bytes], on the host.
        slots: int64 [k] on the host. rows: int64 [k], rows of the units, out of
            n * slots of a unit, that fill them.
        expected: for each of the group's records int64 [k, 2] on the host.
    """

    group: TierGroup
    units: Sequence[Tensor]
    slots: Tensor
    rows: Tensor
    expected: Sequence[Tensor]


class Delivery(NamedTuple):
    """A shipment on its way.

    Fields:
        slots: int64 [k] on the device.
        records: for each of the group's records, int64 [k, words] on the device.
        verdicts: bool [n, 2] on the host, once `Mover.has_arrived`: whether the bytes
            are those that were sent, and whether the records are those expected.
    """

    shipment: Shipment
    slots: Tensor
    records: list[Tensor]
    verdicts: Tensor


class _Stored(NamedTuple):
    event: torch.cuda.Event
    bytes: int


class _Buffers:
    """Two buffers on the device, which are filled and read by turns.

    Args:
        readers: the stream that reads them, or None on the CPU.
    """

    def __init__(self, device: torch.device, readers: torch.cuda.Stream | None) -> None:
        self._device = device
        self._readers = readers
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._read: list[torch.cuda.Event] = []
        self._turn = 0

    def next(self, units: int, bytes_per_unit: int) -> Tensor:
        """Return a buffer uint8 [units, bytes_per_unit]. The current stream waits until
        its last contents were read."""
        size = max(BUFFER_BYTES, bytes_per_unit)
        if self._memory.numel() < 2 * size:
            self._grow(size)
        self._turn = 1 - self._turn
        if self._readers is not None:
            torch.cuda.current_stream().wait_event(self._read[self._turn])
        memory = self._memory.view(2, -1)[self._turn]
        return memory[: units * bytes_per_unit].view(units, bytes_per_unit)

    def _grow(self, size: int) -> None:
        with _on(self._readers):
            self._memory = torch.empty(2 * size, dtype=torch.uint8, device=self._device)
            if self._readers is not None:
                self._read = [torch.cuda.Event() for _ in range(2)]
                # Whoever had this memory before may still be running.
                for event in self._read:
                    event.record(self._readers)

    def was_read(self) -> None:
        """Note that the last buffer is read by what was launched so far."""
        if self._readers is not None:
            self._read[self._turn].record(self._readers)


class Mover:
    """Moves units to and from the slots of one device.

    Args:
        most_stored: bytes that may be on their way to the host.

    Attributes:
        num_copies: copies of buffers to the host that were started.
    """

    def __init__(
        self, device: torch.device, *, most_stored: int = MOST_STORED_AT_ONCE
    ) -> None:
        self.device = device
        self.num_copies = 0
        self._most_stored = most_stored
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._loading = torch.cuda.Stream(device) if is_cuda else None
        self._buffers = _Buffers(device, self._loading)
        self._stored: deque[_Stored] = deque()

    # -- to the host ---------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return how many bytes of units may be stored now without piling up."""
        self.num_copied()
        return self._most_stored - sum(one.bytes for one in self._stored)

    def num_copied(self) -> int:
        """Return how many of `num_copies` have ended; they do so in order."""
        while self._stored and self._stored[0].event.query():
            self._stored.popleft()
        return self.num_copies - len(self._stored)

    def store(
        self, group: TierGroup, slots: Tensor, targets: Sequence[Tensor]
    ) -> torch.cuda.Event | None:
        """Copy units out of their slots, after everything launched so far. Returns what
        marks the end of the copies, or None if they are there.

        Args:
            slots: int64 [n * slots of a unit] on the host.
            targets: n tensors uint8 [bytes] on the host.
        """
        layout, event = group.layout, None
        on_device = self._upload(slots)
        for begin, end in _chunks(len(targets), layout.bytes_per_unit):
            shape = (end - begin, layout.bytes_per_unit)
            buffer = torch.empty(shape, dtype=torch.uint8, device=self.device)
            layout.gather(on_device[begin * layout.slots : end * layout.slots], buffer)
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())
                buffer.record_stream(self._stream)
            with _on(self._stream):
                for target, unit in zip(targets[begin:end], buffer, strict=True):
                    self._copy(target, unit)
            self.num_copies += 1
            if self._stream is not None:
                event = torch.cuda.Event()
                event.record(self._stream)
                self._stored.append(_Stored(event, buffer.nbytes))
        return event

    def wait_for_stores(self) -> None:
        """Wait until every copy to the host is there."""
        if self._stream is not None:
            self._stream.synchronize()

    # -- to the device -------------------------------------------------------------

    def load(self, shipments: Sequence[Shipment]) -> Load:
        """Copy units into slots that no later launch reads or writes before the end,
        and compare what arrived."""
        if self._loading is not None:
            # The slots' last readers may still run.
            self._loading.wait_stream(torch.cuda.current_stream())
        with _on(self._loading):
            deliveries = [self._deliver(shipment) for shipment in shipments]
        event = None
        if self._loading is not None:
            event = torch.cuda.Event()
            event.record(self._loading)
        return Load(deliveries, event)

    def _deliver(self, shipment: Shipment) -> Delivery:
        layout, units = shipment.group.layout, shipment.units
        slots, rows = self._upload(shipment.slots), self._upload(shipment.rows)
        shape = (len(units), layout.tail_bytes)
        tails = torch.empty(shape, dtype=torch.uint8, device=self.device)
        chunks = _chunks(len(units), layout.bytes_per_unit)
        # All chunks but the last have as many rows.
        in_chunk = self._upload(shipment.rows % (chunks[0][1] * layout.slots))
        ends = torch.tensor([end * layout.slots for _, end in chunks])
        first = 0
        for (begin, end), last in zip(
            chunks, torch.searchsorted(shipment.rows, ends).tolist(), strict=True
        ):
            buffer = self._fetch(units[begin:end], layout.bytes_per_unit)
            layout.scatter(buffer, slots[first:last], in_chunk[first:last])
            tails[begin:end].copy_(layout.tails(buffer))
            self._buffers.was_read()
            first = last
        arrived = layout.compare(tails, slots, rows)
        every = zip(
            shipment.group.records, arrived.records, shipment.expected, strict=True
        )
        wrong = [
            _differs(words, self._upload(due), mask=records.identity_mask)
            for records, words, due in every
        ]
        is_expected = ~_any_row(wrong, rows, shape=(len(units), layout.slots))
        verdicts = torch.stack((arrived.is_intact, is_expected), dim=1)
        return Delivery(
            shipment=shipment,
            slots=slots,
            records=arrived.records,
            verdicts=self._to_host(verdicts),
        )

    def _fetch(self, units: Sequence[Tensor], size: int) -> Tensor:
        """Copy units to a buffer uint8 [n, size], for the load stream."""
        with _on(self._stream):
            buffer = self._buffers.next(len(units), size)
            for target, unit in zip(buffer, units, strict=True):
                self._copy(target, unit)
        if self._loading is not None and self._stream is not None:
            self._loading.wait_stream(self._stream)
        return buffer

    # -- between host and device ---------------------------------------------------

    @staticmethod
    def _copy(target: Tensor, source: Tensor) -> None:
        """Copy a unit between host and device, in stream order."""
        target.copy_(source, non_blocking=True)

    def _upload(self, host: Tensor) -> Tensor:
        if self._stream is None:
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


class Load:
    """Shipments on their way to the device.

    Attributes:
        deliveries: one per shipment. They may be read once they have arrived.
    """

    def __init__(
        self, deliveries: list[Delivery], event: torch.cuda.Event | None
    ) -> None:
        self.deliveries = deliveries
        self._event = event

    def has_arrived(self) -> bool:
        """Whether the verdicts are there."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait for the verdicts, and let later launches see what arrived."""
        if self._event is None:
            return
        self._event.synchronize()
        stream = torch.cuda.current_stream()
        for delivery in self.deliveries:
            for tensor in (delivery.slots, *delivery.records):
                tensor.record_stream(stream)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Scope of what is launched on a stream; None: where it would be anyway."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _differs(words: Tensor, due: Tensor, *, mask: int) -> Tensor:
    """Return bool [k]: whether records name another token or history than is due.

    Args:
        words: int64 [k, words of a record]. due: int64 [k, 2], the first two words.
        mask: bits of the first word that count.
    """
    changed = words[:, :2] ^ due
    return ((changed[:, 0] & mask) != 0) | (changed[:, 1] != 0)


def _any_row(
    wrong: Sequence[Tensor], rows: Tensor, *, shape: tuple[int, int]
) -> Tensor:
    """Return bool [units]: whether one of their rows is wrong in one of the lists.

    Args:
        wrong: bool [k] each, of the rows int64 [k] of units; shape: units, and rows of
            a unit.
    """
    flags = torch.zeros(shape, dtype=torch.bool, device=rows.device)
    for found in wrong:
        flags.view(-1)[rows] |= found
    return flags.any(dim=1)


def _chunks(count: int, bytes_per_unit: int) -> list[tuple[int, int]]:
    """Cut `count` units into ranges that fit a buffer."""
    size = max(BUFFER_BYTES // bytes_per_unit, 1)
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]
