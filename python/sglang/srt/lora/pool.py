"""Adapters in memory: all loaded ones on the host, some of them in slots of the model.

Every rank of a tensor parallel group has one pool, and all act alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from sglang.srt.forward.adapter_tiles import TILE, AdapterTiles
from sglang.srt.layers.adapters import (
    PackedAdapter,
    PackedAdapters,
    StackedAdapters,
)
from sglang.srt.layers.linear import GateUpLinear
from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.linear.op import pack_weight
from sglang.srt.layers.ops.lora.op import AdapterStack
from sglang.srt.layers.ops.lora.table import TILE_COUNTS
from sglang.srt.lora.slot_copies import SlotCopies
from sglang.srt.utils.memory import available_device_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sglang.srt.lora.adapter_file import AdapterTensors, Pair
    from sglang.srt.lora.layout import AdaptedModule, AdapterLayout, ModuleShard
    from sglang.srt.mem_cache.page_ledger import IntArray

H = TypeVar("H")


def padded_rank(rank: int) -> int:
    """Return the rank that a slot has room for."""
    return -(-rank // TILE) * TILE


class AdapterPool(ABC, Generic[H]):
    """Loaded adapters by revision, and the slots that the layers read.

    Args:
        num_slots: slots besides slot 0, which has no adapter.
        evicts_oldest: whether the adapter that came first leaves its slot first, and
            not the one that was used least recently.
        dtype: of the products.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        *,
        num_slots: int,
        evicts_oldest: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.num_slots = num_slots
        self._evicts_oldest = evicts_oldest
        self._loaded: dict[str, H] = {}
        # Slots by revision; the next to be evicted comes first.
        self._slots: dict[str, int] = {}
        self._held: frozenset[str] = frozenset()
        self.num_placed = 0

    # -- loaded adapters -----------------------------------------------------------

    def __contains__(self, revision: str) -> bool:
        return revision in self._loaded

    def add(self, adapter: AdapterTensors) -> None:
        """Keep an adapter on the host.

        Raises:
            ValueError: there is no memory for it.
        """
        try:
            self._loaded[adapter.revision] = self._prepare(adapter)
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"the host has no memory for an adapter beside {len(self._loaded)} "
                f"others ({error}); unload one, and lower --max-loaded-loras"
            ) from error

    def remove(self, revision: str) -> None:
        """Forget an adapter that no request uses any more."""
        del self._loaded[revision]
        slot = self._slots.pop(revision, None)
        if slot is not None:
            self._clear(slot)

    # -- slots ---------------------------------------------------------------------

    def hold(self, revisions: Collection[str]) -> None:
        """Put these adapters into slots, where they stay until the next call.

        The host does not wait for copies; `reading` does so on the device.

        Raises:
            RuntimeError: there are fewer slots.
        """
        self._held = frozenset(revisions)
        # In an order that is the same on all ranks.
        self._place(sorted(self._held))

    def slots_of(self, revisions: Sequence[str | None]) -> IntArray:
        """Return the slot of each adapter, 0 for None. Adapters without a slot get
        one."""
        named = {revision for revision in revisions if revision is not None}
        self._place(sorted(named))
        slots = [0 if name is None else self._slots[name] for name in revisions]
        return np.array(slots, dtype=np.int64)

    def revisions_in(self, slots: IntArray) -> list[str | None]:
        """Return the adapter in each slot, or None."""
        of_slots = {slot: revision for revision, slot in self._slots.items()}
        return [of_slots.get(slot) for slot in slots.tolist()]

    def _place(self, revisions: Iterable[str]) -> None:
        wanted = list(revisions)
        for revision in wanted:
            slot = self._slots.get(revision)
            if slot is None:
                slot = self._free_slot(keep=self._held.union(wanted))
                self._load(slot, self._loaded[revision])
                self.num_placed += 1
            elif self._evicts_oldest:
                continue
            else:
                del self._slots[revision]
            self._slots[revision] = slot

    def _free_slot(self, *, keep: Collection[str]) -> int:
        if len(self._slots) < self.num_slots:
            taken = set(self._slots.values())
            return next(s for s in range(1, self.num_slots + 1) if s not in taken)
        for revision in self._slots:
            if revision not in keep:
                slot = self._slots.pop(revision)
                self._clear(slot)
                return slot
        raise RuntimeError(
            f"{len(keep)} adapters are needed at once, but --max-loras-per-batch is "
            f"{self.num_slots}"
        )

    def reading(self, tiles: AdapterTiles) -> AbstractContextManager[None]:
        """Scope of a forward over these tiles."""
        return nullcontext()

    # -- memory --------------------------------------------------------------------

    @abstractmethod
    def _prepare(self, adapter: AdapterTensors) -> H:
        """Return this rank's part of an adapter in the form that `_load` copies."""

    @abstractmethod
    def _load(self, slot: int, adapter: H) -> None:
        """Copy an adapter to a slot."""

    @abstractmethod
    def _clear(self, slot: int) -> None:
        """Make a slot empty."""


class StackedPool(AdapterPool["tuple[Tensor, int]"]):
    """Slots at fixed addresses, so that graphs can read them. An adapter is one
    contiguous piece, and takes one copy.

    Args:
        rank: largest rank.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        *,
        num_slots: int,
        evicts_oldest: bool,
        rank: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        super().__init__(
            layout, num_slots=num_slots, evicts_oldest=evicts_oldest, dtype=dtype
        )
        self._rank = padded_rank(rank)
        self._size = sum(sum(self._sizes(module)) for module in layout.modules)
        _check_memory(num_slots * self._size * dtype.itemsize, device, self._rank)
        self._slots_data = torch.zeros(
            num_slots, self._size, dtype=dtype, device=device
        )
        self._ranks = torch.zeros(1 + num_slots, dtype=torch.int32, device=device)
        self._copies = None if device == "cpu" else SlotCopies(device)
        start = 0
        for module in layout.modules:
            a_size, b_size = self._sizes(module)
            a = self._slots_data[:, start : start + a_size]
            b = self._slots_data[:, start + a_size : start + a_size + b_size]
            start += a_size + b_size
            rows = len(module.shards) * self._rank
            module.linear.adapters = StackedAdapters(
                AdapterStack(
                    a=a.unflatten(1, (rows, module.inputs)),
                    b=b.unflatten(1, (sum(module.sizes), self._rank)),
                    ranks=self._ranks,
                    sizes=module.sizes,
                )
            )

    def _sizes(self, module: AdaptedModule) -> tuple[int, int]:
        """Elements of A and B of a module; both a multiple of 8."""
        return (
            len(module.shards) * self._rank * module.inputs,
            sum(module.sizes) * self._rank,
        )

    def warm_up(self) -> None:
        """Compile all kernels, with tiles without an adapter."""
        done = set()
        for module in self.layout.modules:
            layer = module.linear.adapters
            shape = (module.inputs, module.sizes)
            if layer is None or shape in done:
                continue
            done.add(shape)
            new = self._slots_data.new_zeros
            for count in TILE_COUNTS:
                words = torch.zeros(
                    count, 1 + TILE, dtype=torch.int32, device=self._ranks.device
                )
                y, x = new(1, sum(module.sizes)), new(1, module.inputs)
                gain = layer.gain(x, AdapterTiles(words=words))
                gain.add(y)
                if isinstance(module.linear, GateUpLinear):
                    for activation in GATED:
                        gain.add_gated(y, activation)

    def _prepare(self, adapter: AdapterTensors) -> tuple[Tensor, int]:
        data = torch.zeros(
            self._size, dtype=self.dtype, pin_memory=self._copies is not None
        )
        start = 0
        for module in self.layout.modules:
            a_size, b_size = self._sizes(module)
            a = data[start : start + a_size].view(-1, self._rank, module.inputs)
            b = data[start + a_size : start + a_size + b_size].view(-1, self._rank)
            start += a_size + b_size
            first = 0
            for i, shard in enumerate(module.shards):
                size = shard.kept_outputs.size
                pair = _kept(adapter.pairs, shard)
                if pair is not None:
                    a[i, : len(pair.a)] = pair.a
                    b[first : first + size, : len(pair.a)] = pair.b
                first += size
        return data, adapter.rank

    def _load(self, slot: int, adapter: tuple[Tensor, int]) -> None:
        data, rank = adapter
        with self._writing(slot):
            self._slots_data[slot - 1].copy_(data, non_blocking=True)
            self._ranks[slot].fill_(rank)

    def _clear(self, slot: int) -> None:
        with self._writing(slot):
            self._ranks[slot].fill_(0)

    def _writing(self, slot: int) -> AbstractContextManager[None]:
        return nullcontext() if self._copies is None else self._copies.writing(slot)

    def reading(self, tiles: AdapterTiles) -> AbstractContextManager[None]:
        if self._copies is None:
            return nullcontext()
        return self._copies.reading(tiles.slots_read)


class PackedPool(AdapterPool["list[PackedAdapter | None]"]):
    """Slots of the CPU, whose layers read packed weights."""

    def __init__(
        self, layout: AdapterLayout, *, num_slots: int, evicts_oldest: bool
    ) -> None:
        super().__init__(layout, num_slots=num_slots, evicts_oldest=evicts_oldest)
        self._layers = [PackedAdapters(num_slots) for _ in layout.modules]
        for module, layer in zip(layout.modules, self._layers, strict=True):
            module.linear.adapters = layer

    def _prepare(self, adapter: AdapterTensors) -> list[PackedAdapter | None]:
        return [_pack(adapter.pairs, module) for module in self.layout.modules]

    def _load(self, slot: int, adapter: list[PackedAdapter | None]) -> None:
        for layer, packed in zip(self._layers, adapter, strict=True):
            layer.slots[slot] = packed

    def _clear(self, slot: int) -> None:
        for layer in self._layers:
            layer.slots[slot] = None


def _check_memory(needed: int, device: str, rank: int) -> None:
    """
    Raises:
        ValueError: the slots do not fit; names the flags.
    """
    free = available_device_bytes(device)
    if needed > free:
        raise ValueError(
            f"the slots of adapters take {needed / 2**30:.1f} GiB with rank {rank}, "
            f"but {free / 2**30:.1f} GiB are free; lower --max-loras-per-batch or "
            "--max-lora-rank, or name fewer --lora-target-modules"
        )


def _kept(pairs: Mapping[ModuleShard, Pair], shard: ModuleShard) -> Pair | None:
    """Return this rank's part of a pair, if the adapter has it."""
    pair = pairs.get(shard)
    if pair is None:
        return None
    inputs, outputs = shard.kept_inputs, shard.kept_outputs
    return pair._replace(
        a=pair.a.narrow(1, inputs.start, inputs.size),
        b=pair.b.narrow(0, outputs.start, outputs.size),
    )


def _pack(
    pairs: Mapping[ModuleShard, Pair], module: AdaptedModule
) -> PackedAdapter | None:
    """Pack an adapter's part of a layer; a shard without one is a product of zeros."""
    found = [_kept(pairs, shard) for shard in module.shards]
    if not any(found):
        return None
    a, b = [], []
    for pair, size in zip(found, module.sizes, strict=True):
        a.append(torch.zeros(1, module.inputs) if pair is None else pair.a)
        b.append(pack_weight(torch.zeros(size, 1) if pair is None else pair.b))
    return PackedAdapter(pack_weight(torch.cat(a)), tuple(b))
