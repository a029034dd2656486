"""What linear layers add for the tokens that have an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from sglang.srt.forward.context import get_forward_context
from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.linear.op import PackedWeight, linear
from sglang.srt.layers.ops.lora.op import (
    AdapterStack,
    lora_expand,
    lora_expand_gated,
    lora_shrink,
)

if TYPE_CHECKING:
    from sglang.srt.forward.adapter_tiles import AdapterTiles


def current_tiles() -> AdapterTiles | None:
    """The tokens with an adapter in the forward in progress, or None."""
    return get_forward_context().adapters


class Gain(Protocol):
    """What adapters add to a layer's product with one x [T, K]."""

    def add(self, y: Tensor) -> Tensor:
        """Add it to y [T, N] in place; returns `y`."""

    def add_gated(self, y: Tensor, activation: str) -> Tensor:
        """Add it to y [T, 2 * I], which may be overwritten, and return the gated
        activation of that, [T, I]."""


class LayerAdapters(Protocol):
    """The adapters of one layer."""

    def gain(self, x: Tensor, tiles: AdapterTiles) -> Gain:
        """Begin the adapters' products for x [T, K]."""


class StackedGain(NamedTuple):
    """Products whose first half is done."""

    inner: Tensor
    stack: AdapterStack
    tiles: AdapterTiles

    def add(self, y: Tensor) -> Tensor:
        return lora_expand(y, self.inner, self.stack, self.tiles)

    def add_gated(self, y: Tensor, activation: str) -> Tensor:
        return lora_expand_gated(y, self.inner, self.stack, self.tiles, activation)


class StackedAdapters:
    """Adapters at fixed addresses, for launches over all of them."""

    def __init__(self, stack: AdapterStack) -> None:
        self.stack = stack

    def gain(self, x: Tensor, tiles: AdapterTiles) -> StackedGain:
        return StackedGain(lora_shrink(x, self.stack, tiles), self.stack, tiles)


class PackedAdapter(NamedTuple):
    """One adapter of a layer, packed for the CPU.

    Fields:
        a: [shards * rank, K] packed.
        b: per shard [size, rank] packed, scaled.
    """

    a: PackedWeight
    b: tuple[PackedWeight, ...]


class PackedGain(NamedTuple):
    """Products of packed adapters, by slot."""

    x: Tensor
    slots: list[PackedAdapter | None]
    tiles: AdapterTiles

    def add(self, y: Tensor) -> Tensor:
        assert self.tiles.groups is not None
        for slot, rows in self.tiles.groups:
            adapter = self.slots[slot]
            if adapter is None:
                continue  # it does not adapt this layer
            inner = linear(self.x.index_select(0, rows), adapter.a)
            gained = y.new_zeros(len(rows), y.shape[1])
            start = first = 0
            for b in adapter.b:
                part = inner[:, first : first + b.k].contiguous()
                gained[:, start : start + b.n] = linear(part, b)
                start, first = start + b.n, first + b.k
            y.index_add_(0, rows, gained)
        return y

    def add_gated(self, y: Tensor, activation: str) -> Tensor:
        return GATED[activation](self.add(y))


class PackedAdapters:
    """Adapters for the CPU's product, in which a token's result does not depend on the
    other tokens, bit by bit.

    Attributes:
        slots: the adapter in each slot, or None.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots: list[PackedAdapter | None] = [None] * (1 + num_slots)

    def gain(self, x: Tensor, tiles: AdapterTiles) -> PackedGain:
        return PackedGain(x, self.slots, tiles)
