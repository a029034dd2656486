"""What a verification keeps of its nodes until some of them are accepted.

A verification only reads the states. The commit folds the accepted path into them, from
these tensors, which lie at fixed addresses because graphs write them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.layers.ops.state.gated_delta.inputs import DeltaNodes

if TYPE_CHECKING:
    from sglang.srt.mem_cache.state_pool import StatePool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNodes:
    """The nodes of one layer.

    Fields:
        inputs: [nodes, C], of the convolution. delta: of the matrices, or None.
    """

    inputs: Tensor
    delta: DeltaNodes | None

    def narrow(self, count: int) -> LayerNodes:
        """Return the first `count` nodes, in the same memory."""
        delta = self.delta
        if delta is not None:
            delta = DeltaNodes(
                k=delta.k[:count], u=delta.u[:count], decay=delta.decay[:count]
            )
        return LayerNodes(inputs=self.inputs[:count], delta=delta)


class StateNodes:
    """Up to `size` nodes of every layer of `pool`."""

    def __init__(self, pool: StatePool, *, size: int) -> None:
        self.size = size
        self._layers = {layer: _allocate(pool, size) for layer in pool.shape.layers}

    def layer(self, layer_id: int) -> LayerNodes:
        return self._layers[layer_id]


def _allocate(pool: StatePool, size: int) -> LayerNodes:
    shape, delta = pool.shape, None
    if pool.matrix is not None:
        assert shape.delta is not None
        delta = DeltaNodes.allocate(
            size, pool.matrix[:, 0], key_heads=shape.delta.key_heads
        )
    inputs = torch.zeros(
        (size, shape.conv_channels), dtype=shape.dtype, device=pool.conv.device
    )
    return LayerNodes(inputs=inputs, delta=delta)
