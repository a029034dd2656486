"""The unit that moves between tiers: the KV of consecutive tokens, and its proof.

A unit covers `unit_tokens(page_size)` positions of one sequence. Its key is a hash of
all tokens up to its end, so that equal keys mean equal histories. For every group of
slots it is one run of bytes:

```
bytes of tensor 0 [layers, slots, bytes of a slot] | tensor 1 | ... | records | sums
```
with one 64-bit sum per slot over all its bytes and records. The sender computes the
sums from the memory that the bytes were copied from, the receiver from the memory that
they were copied to. Records are what a canary knows of a slot; the receiver decides
when to take them over. Knows tensors, but no cache, no canary and no place where units
are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.kv_tiers.ops.slot_sums.op import add_slot_sums
from sglang.srt.kv_tiers.ops.unit_rows.op import gather_rows, scatter_rows

if TYPE_CHECKING:
    from sglang.srt.mem_cache.page_ledger import IntArray

UnitKey = bytes

KEY_BYTES = 16
# Small units cost time on the host, large ones lose the tail of a prefix.
_LEAST_TOKENS = 64
_SUM = torch.int64


def unit_tokens(page_size: int) -> int:
    """Return the tokens of a unit: whole pages, and at least 64."""
    return -(-_LEAST_TOKENS // page_size) * page_size


def first_key(identity: bytes, namespace: str | None) -> UnitKey:
    """Return the key that the first unit of a sequence continues.

    Args:
        identity: digest of everything besides tokens that the bytes depend on.
    """
    digest = blake2b(identity, digest_size=KEY_BYTES)
    if namespace is not None:
        digest.update(b"\0" + namespace.encode())
    return digest.digest()


def unit_keys(first: UnitKey, elements: IntArray, size: int) -> list[UnitKey]:
    """Return the keys of the whole units of a sequence.

    Args:
        first: `first_key` of its namespace.
        elements: int64 [n], the sequence's elements as in the prefix cache.
        size: tokens of a unit.
    """
    data = elements.astype("<i8", copy=False).tobytes()
    stride = 8 * size
    keys, key = [], first
    for begin in range(0, len(data) - stride + 1, stride):
        key = blake2b(
            key + data[begin : begin + stride], digest_size=KEY_BYTES
        ).digest()
        keys.append(key)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitNames:
    """How the units of an engine are named.

    Fields:
        identity: digest of everything besides tokens that KV depends on.
        size: tokens of a unit.
    """

    identity: bytes
    size: int

    def keys(self, elements: IntArray, namespace: str | None) -> list[UnitKey]:
        """Return the keys of the whole units of a sequence."""
        return unit_keys(first_key(self.identity, namespace), elements, self.size)


def with_descendants(
    keys: Iterable[UnitKey], parents: Mapping[UnitKey, UnitKey]
) -> set[UnitKey]:
    """Return `keys` and the keys of all units that continue one of them.

    Args:
        parents: the key of the unit before each known unit.
    """
    children: dict[UnitKey, list[UnitKey]] = {}
    for key, parent in parents.items():
        children.setdefault(parent, []).append(key)
    found: set[UnitKey] = set()
    due = list(keys)
    while due:
        key = due.pop()
        if key not in found:
            found.add(key)
            due += children.get(key, ())
    return found


class SlotTensor:
    """A tensor with one row of bytes per layer and slot, as words.

    Args:
        name: name in errors.
        tensor: [layers, slots, ...], or [slots, ...] with `has_layers=False`; the
            elements of one slot in one layer are contiguous.

    Attributes:
        words: the same memory, [layers, slots, words of a slot].
        row_bytes: bytes of a slot in one layer.
        dtype: name of the elements' type.
    """

    def __init__(self, name: str, tensor: Tensor, *, has_layers: bool = True) -> None:
        rows = (tensor if has_layers else tensor.unsqueeze(0)).flatten(2)
        self.name = name
        self.dtype = str(tensor.dtype)
        self.row_bytes = rows.shape[2] * rows.element_size()
        self.words = rows.view(_word_type(rows))

    @property
    def bytes_per_slot(self) -> int:
        return self.words.shape[0] * self.row_bytes


def _word_type(rows: Tensor) -> torch.dtype:
    """Return the widest integer type in which rows of bytes can be moved."""
    item = rows.element_size()
    places = [rows.shape[2], *rows.stride()[:2], rows.storage_offset()]
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(place * item % dtype.itemsize == 0 for place in places):
            return dtype
    return torch.uint8


class Arrived(NamedTuple):
    """What a unit brought, still on the device.

    Fields:
        is_intact: bool [n], whether every slot of a unit has the sum that it left with.
        records: [k, words] for each tensor of records, of the slots that were filled.
    """

    is_intact: Tensor
    records: list[Tensor]


@dataclass(frozen=True)
class UnitLayout:
    """The bytes of one group's units.

    Fields:
        slots: slots of a unit.
        tensors: tensors whose rows it holds.
        records: further tensors [1, slots, words] whose rows it holds.
    """

    slots: int
    tensors: tuple[SlotTensor, ...]
    records: tuple[SlotTensor, ...] = ()

    @property
    def _every(self) -> tuple[SlotTensor, ...]:
        return (*self.tensors, *self.records)

    @cached_property
    def offsets(self) -> list[int]:
        """The place of each tensor's bytes in a unit, and then that of the sums."""
        places = [0]
        for tensor in self._every:
            size = tensor.bytes_per_slot * self.slots
            # The next part may consist of wider words.
            places.append(places[-1] + -(-size // 8) * 8)
        return places

    @property
    def bytes_per_unit(self) -> int:
        return self.offsets[-1] + self.slots * _SUM.itemsize

    def part(self, units: Tensor, number: int) -> Tensor:
        """Return the rows of tensor `number`, records last, in units [n, bytes]: a view
        [n, layers, slots, words]."""
        tensor = self._every[number]
        size = tensor.bytes_per_slot * self.slots
        begin = self.offsets[number]
        words = units[:, begin : begin + size].view(tensor.words.dtype)
        layers, _, width = tensor.words.shape
        return words.view(len(units), layers, self.slots, width)

    def sums(self, units: Tensor) -> Tensor:
        """Return the sums in units [n, bytes]: a view int64 [n, slots]."""
        return units[:, self.offsets[-1] : self.bytes_per_unit].view(_SUM)

    def seal(self, unit: Tensor) -> bytes:
        """Return a digest of the sums of a unit, uint8 [bytes] on the host, which names
        its contents."""
        sums = unit[self.offsets[-1] : self.bytes_per_unit]
        return blake2b(sums.numpy().data, digest_size=KEY_BYTES).digest()

    def gather(self, slots: Tensor, units: Tensor) -> None:
        """Copy slots into units, with sums of the memory that they lie in.

        Args:
            slots: int64 [n * self.slots] on the device.
            units: uint8 [n, bytes_per_unit] on the device.
        """
        sums, first = torch.zeros_like(slots), 0
        for number, tensor in enumerate(self._every):
            rows = self.part(units, number)
            gather_rows(rows, sums, tensor.words, slots, first_layer=first)
            first += tensor.words.shape[0]
        self.sums(units).copy_(sums.view(len(units), self.slots))

    def slot_sums(self, slots: Tensor) -> Tensor:
        """Return the sums of all bytes and records of slots, where they lie: int64
        [n]."""
        return _slot_sums(((t.words, slots) for t in self._every), like=slots)

    def scatter(self, units: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Copy units into slots, without their records.

        Args:
            units: uint8 [n, bytes_per_unit] on the device.
            slots: int64 [k] on the device, distinct.
            rows: int64 [k] on the device, ascending: which of the n * self.slots rows
                go there.
        """
        for number, tensor in enumerate(self.tensors):
            scatter_rows(tensor.words, slots, self.part(units, number), rows)

    def tails(self, units: Tensor) -> Tensor:
        """Return what proves units [n, bytes_per_unit], their records and sums: a view
        uint8 [n, tail_bytes]."""
        return units[:, self._tail_begin : self.bytes_per_unit]

    @property
    def tail_bytes(self) -> int:
        return self.bytes_per_unit - self._tail_begin

    @property
    def _tail_begin(self) -> int:
        return self.offsets[len(self.tensors)]

    def compare(self, tails: Tensor, slots: Tensor, rows: Tensor) -> Arrived:
        """Compare the sums of units with what lies in the slots that they were copied
        to.

        Args:
            tails: uint8 [n, tail_bytes] on the device, contiguous.
            slots, rows: as in `scatter`.
        """
        places = [(tensor.words, slots) for tensor in self.tensors]
        records = [
            self._record_rows(tails, number, rows)
            for number in range(len(self.records))
        ]
        every = torch.arange(len(rows), device=rows.device)
        places += [(words, every) for words in records]
        found = _slot_sums(places, like=slots)
        begin = self.offsets[-1] - self._tail_begin
        due = tails[:, begin:].view(_SUM).reshape(-1)
        differs = torch.zeros_like(due)
        differs[rows] = (found != due[rows]).to(_SUM)
        is_intact = differs.view(len(tails), self.slots).sum(dim=1) == 0
        return Arrived(is_intact, [words[0] for words in records])

    def _record_rows(self, tails: Tensor, number: int, rows: Tensor) -> Tensor:
        """Return some rows of records `number`, [1, k, words]."""
        tensor = self.records[number]
        begin = self.offsets[len(self.tensors) + number] - self._tail_begin
        size = tensor.bytes_per_slot * self.slots
        words = tails[:, begin : begin + size].view(tensor.words.dtype)
        width = tensor.words.shape[2]
        return words.reshape(1, -1, width).index_select(1, rows)


def _slot_sums(places: Iterable[tuple[Tensor, Tensor]], *, like: Tensor) -> Tensor:
    """Return the sums over all layers of tensors [layers, slots, words], in order, each
    with the slots [n] to sum: int64 [n]."""
    sums = torch.zeros_like(like)
    first = 0
    for words, slots in places:
        add_slot_sums(sums, words, slots, first_layer=first)
        first += words.shape[0]
    return sums
