"""Adapters in memory: all loaded ones on the host, some of them in slots of the model.

Every rank of a tensor parallel group has one pool, and all act alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from sglang.srt.layers.adapters import PackedAdapter, PackedAdapters
from sglang.srt.layers.ops.linear.op import pack_weight

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sglang.srt.forward.adapter_tiles import AdapterTiles
    from sglang.srt.lora.adapter_file import AdapterTensors, Pair
    from sglang.srt.lora.layout import AdaptedModule, AdapterLayout, ModuleShard
    from sglang.srt.mem_cache.page_ledger import IntArray

H = TypeVar("H")


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


def kept(pairs: Mapping[ModuleShard, Pair], shard: ModuleShard) -> Pair | None:
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
    found = [kept(pairs, shard) for shard in module.shards]
    if not any(found):
        return None
    a, b = [], []
    for pair, size in zip(found, module.sizes, strict=True):
        a.append(torch.zeros(1, module.inputs) if pair is None else pair.a)
        b.append(pack_weight(torch.zeros(size, 1) if pair is None else pair.b))
    return PackedAdapter(pack_weight(torch.cat(a)), tuple(b))
