"""What linear layers add for the tokens that have an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from sglang.srt.forward.context import get_forward_context
from sglang.srt.layers.ops.linear.op import PackedWeight, linear
from sglang.srt.layers.ops.lora.op import AdapterStack, lora_add

if TYPE_CHECKING:
    from sglang.srt.forward.adapter_tiles import AdapterTiles


def current_tiles() -> AdapterTiles | None:
    """The tokens with an adapter in the forward in progress, or None."""
    return get_forward_context().adapters


class LayerAdapters(Protocol):
    """The adapters of one layer."""

    def add(self, y: Tensor, x: Tensor, tiles: AdapterTiles) -> None:
        """Add the adapters' products for x [T, K] to y [T, N], in place."""


class StackedAdapters:
    """Adapters at fixed addresses, for one launch over all of them."""

    def __init__(self, stack: AdapterStack) -> None:
        self.stack = stack

    def add(self, y: Tensor, x: Tensor, tiles: AdapterTiles) -> None:
        lora_add(y, x, self.stack, tiles)


class PackedAdapter(NamedTuple):
    """One adapter of a layer, packed for the CPU.

    Fields:
        a: [shards * rank, K] packed.
        b: per shard [size, rank] packed, scaled.
    """

    a: PackedWeight
    b: tuple[PackedWeight, ...]


class PackedAdapters:
    """Adapters for the CPU's product, in which a token's result does not depend on the
    other tokens, bit by bit.

    Attributes:
        slots: the adapter in each slot, or None.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots: list[PackedAdapter | None] = [None] * (1 + num_slots)

    def add(self, y: Tensor, x: Tensor, tiles: AdapterTiles) -> None:
        assert tiles.groups is not None
        for slot, rows in tiles.groups:
            adapter = self.slots[slot]
            if adapter is None:
                continue  # it does not adapt this layer
            inner = linear(x.index_select(0, rows), adapter.a)
            gained = y.new_zeros(len(rows), y.shape[1])
            start = first = 0
            for b in adapter.b:
                part = inner[:, first : first + b.k].contiguous()
                gained[:, start : start + b.n] = linear(part, b)
                start, first = start + b.n, first + b.k
            y.index_add_(0, rows, gained)
