"""What linear layers add for the tokens that have an adapter."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from sglang.srt.forward.adapter_tiles import TILE, AdapterTiles
from sglang.srt.forward.context import get_forward_context
from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.linear.op import AnyWeight, PackedWeight, linear
from sglang.srt.layers.ops.lora.op import (
    AdapterStack,
    lora_expand,
    lora_expand_gated,
    lora_shrink,
)
from sglang.srt.layers.ops.lora.table import TILE_COUNTS


def current_tiles() -> AdapterTiles | None:
    """The tokens with an adapter in the forward in progress, or None."""
    return get_forward_context().adapters


class LayerAdapters(Protocol):
    """The adapters of one layer."""

    def linear(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        tiles: AdapterTiles,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """`ops.linear.linear` of x [T, K] with the layer's weight, plus the adapters'
        products."""

    def linear_gated(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        tiles: AdapterTiles,
        activation: str,
    ) -> Tensor:
        """The gated activation of `linear`."""


class JoinedWeight(NamedTuple):
    """A layer's weight with the A of all slots behind its rows.

    Fields:
        weight: [N + slots * width, K]. bias: [N + slots * width] or None.
    """

    weight: Tensor
    bias: Tensor | None


class StackedAdapters:
    """Adapters at fixed addresses, for launches over all of them.

    Args:
        joined: holds the A of `stack`; None if they are apart.
    """

    def __init__(self, stack: AdapterStack, joined: JoinedWeight | None = None) -> None:
        self.stack = stack
        self._joined = joined

    def linear(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        tiles: AdapterTiles,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        y, inner = self._product(x, weight, bias, tiles, out)
        return lora_expand(y, inner, self.stack, tiles, out=out)

    def linear_gated(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        tiles: AdapterTiles,
        activation: str,
    ) -> Tensor:
        y, inner = self._product(x, weight, bias, tiles, None)
        return lora_expand_gated(y, inner, self.stack, tiles, activation)

    def _product(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        tiles: AdapterTiles,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's own product, and x's with A, or None if that is behind the
        former. See `lora_expand`."""
        joined = self._joined
        if joined is not None:
            # On some ranks the layer has a bias that it does not add.
            bias = None if bias is None else joined.bias
            return linear(x, joined.weight, bias), None
        # First, because it is short, and the other one starts while it runs.
        inner = lora_shrink(x, self.stack, tiles)
        return linear(x, weight, bias, out=out), inner

    def warm_up(self, *, is_gated: bool) -> None:
        """Compile all kernels, with tiles without an adapter."""
        stack = self.stack
        outputs, behind = sum(stack.sizes), len(stack.b) * stack.width
        for count in TILE_COUNTS:
            words = stack.ranks.new_zeros(count, 1 + TILE)
            tiles = AdapterTiles(words=words)
            y, inner = stack.b.new_zeros(1, outputs + behind), None
            if self._joined is None:
                x = stack.a.new_zeros(1, stack.a.shape[2])
                inner, y = lora_shrink(x, stack, tiles), y[:, :outputs]
            lora_expand(y, inner, stack, tiles)
            for activation in GATED if is_gated else ():
                lora_expand_gated(y, inner, stack, tiles, activation)


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

    def linear(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        tiles: AdapterTiles,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        assert tiles.groups is not None
        y = linear(x, weight, bias, out=out)
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
        return y

    def linear_gated(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        tiles: AdapterTiles,
        activation: str,
    ) -> Tensor:
        return GATED[activation](self.linear(x, weight, bias, tiles))
