"""Adapters on a GPU: slots that graphs read, and rows behind the layers' weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.forward.adapter_tiles import TILE, AdapterTiles
from sglang.srt.layers.adapters import StackedAdapters
from sglang.srt.layers.linear import GateUpLinear
from sglang.srt.layers.ops.lora.op import AdapterStack
from sglang.srt.lora.pool import AdapterPool, kept
from sglang.srt.lora.slot_copies import SlotCopies
from sglang.srt.utils.memory import available_device_bytes

if TYPE_CHECKING:
    from sglang.srt.lora.adapter_file import AdapterTensors
    from sglang.srt.lora.layout import AdaptedModule, AdapterLayout

MOST_JOINED = 8
"""The A of all slots are rows behind a layer's weight, if there is at most one for so
many of its own. Each product of a batch with adapters computes all of them."""


def padded_rank(rank: int) -> int:
    """Return the rank that a slot has room for."""
    return -(-rank // TILE) * TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where an adapter of a layer is in the data of an adapter.

    Fields:
        a: [shards * rank, inputs]. b: [outputs, rank].
        is_joined: A goes behind the rows of the layer's weight, not to a slot.
    """

    module: AdaptedModule
    a: slice
    b: slice
    is_joined: bool


class StackedPool(AdapterPool["tuple[Tensor, int]"]):
    """Slots at fixed addresses, so that graphs can read them. An adapter is one
    contiguous piece on the host, and takes one copy or two.

    The A of all slots go behind the rows of a plain weight if they are few.

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
        self._device = device
        self._places, self._apart, self._size = self._plan()
        _check_memory(num_slots * self._size * dtype.itemsize, device, self._rank)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._slots_data = torch.zeros(num_slots, self._apart, **options)
        # Where an adapter's A wait for the copies behind the weights.
        self._staged = torch.zeros(self._size - self._apart, **options)
        self._staged_parts: list[Tensor] = []
        self._joined_parts: list[list[Tensor]] = [[] for _ in range(num_slots)]
        self._ranks = torch.zeros(1 + num_slots, dtype=torch.int32, device=device)
        for place in self._places:
            place.module.linear.adapters = self._stacked(place)
        self._copies = None if device == "cpu" else SlotCopies(device)

    def _plan(self) -> tuple[list[_Place], int, int]:
        """Return the places, the end of what goes to a slot, and that of all data."""
        end = 0

        def take(size: int) -> slice:
            nonlocal end
            end += size
            return slice(end - size, end)

        modules = self.layout.modules
        sizes = [self._sizes(module) for module in modules]
        joins = [self._joins(module) for module in modules]
        b = [take(b_size) for _, b_size in sizes]
        a = {i: take(a_size) for i, (a_size, _) in enumerate(sizes) if not joins[i]}
        apart = end
        a |= {i: take(a_size) for i, (a_size, _) in enumerate(sizes) if joins[i]}
        places = [
            _Place(module=module, a=a[i], b=b[i], is_joined=joins[i])
            for i, module in enumerate(modules)
        ]
        return places, apart, end

    def _joins(self, module: AdaptedModule) -> bool:
        linear, rows = module.linear, self.num_slots * self._width(module)
        is_plain = linear.packed is None and linear.quantized is None
        return is_plain and rows * MOST_JOINED <= sum(module.sizes)

    def _width(self, module: AdaptedModule) -> int:
        return len(module.shards) * self._rank

    def _sizes(self, module: AdaptedModule) -> tuple[int, int]:
        """Elements of A and B of a module; both a multiple of 8."""
        return self._width(module) * module.inputs, sum(module.sizes) * self._rank

    def _stacked(self, place: _Place) -> StackedAdapters:
        module, slots = place.module, self.num_slots
        width, outputs = self._width(module), sum(module.sizes)
        joined = None
        if place.is_joined:
            joined = module.linear.extended(slots * width)
            if self._device != "cpu":
                torch.cuda.empty_cache()  # the next layer's is a little larger
            a = joined.weight[outputs:].view(slots, width, -1)
            for parts, part in zip(self._joined_parts, a, strict=True):
                parts.append(part)
            start = place.a.start - self._apart
            staged = self._staged[start : start + a[0].numel()]
            self._staged_parts.append(staged.view_as(a[0]))
        else:
            a = self._slots_data[:, place.a].unflatten(1, (width, module.inputs))
        stack = AdapterStack(
            a=a,
            b=self._slots_data[:, place.b].unflatten(1, (outputs, self._rank)),
            ranks=self._ranks,
            sizes=module.sizes,
        )
        return StackedAdapters(stack, joined)

    def warm_up(self) -> None:
        """Compile all kernels, with tiles without an adapter."""
        done = set()
        for place in self._places:
            module, layer = place.module, place.module.linear.adapters
            assert isinstance(layer, StackedAdapters)
            shape = (module.inputs, module.sizes, place.is_joined)
            if shape in done:
                continue
            done.add(shape)
            layer.warm_up(is_gated=isinstance(module.linear, GateUpLinear))

    def _prepare(self, adapter: AdapterTensors) -> tuple[Tensor, int]:
        data = torch.zeros(
            self._size, dtype=self.dtype, pin_memory=self._copies is not None
        )
        for place in self._places:
            module = place.module
            a = data[place.a].view(-1, self._rank, module.inputs)
            b = data[place.b].view(-1, self._rank)
            first = 0
            for i, shard in enumerate(module.shards):
                size = shard.kept_outputs.size
                pair = kept(adapter.pairs, shard)
                if pair is not None:
                    a[i, : len(pair.a)] = pair.a
                    b[first : first + size, : len(pair.a)] = pair.b
                first += size
        return data, adapter.rank

    def _load(self, slot: int, adapter: tuple[Tensor, int]) -> None:
        data, rank = adapter
        with self._writing(slot):
            self._slots_data[slot - 1].copy_(data[: self._apart], non_blocking=True)
            if self._staged_parts:
                self._staged.copy_(data[self._apart :], non_blocking=True)
                torch._foreach_copy_(self._joined_parts[slot - 1], self._staged_parts)
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
