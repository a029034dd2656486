"""The bytes of recurrent state: for each slot, the state of every layer that has one.

Slot 0 is scratch. Slots 1 .. R belong to the request rows of the same number, the
others are checkpoints of the prefix cache (`groups/state_slots.py`). Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.mem_cache.ops.copy_slots.op import copy_slots

if TYPE_CHECKING:
    from sglang.srt.configs.state_config import DeltaShape
    from sglang.srt.forward.state_plan import StateCopies


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What one slot holds on this rank.

    Fields:
        layers: the model's layers with a state, ascending.
        conv_channels, conv_inputs: inputs that a convolution keeps.
        delta: heads and channels of the matrices, or None.
        dtype: of activations, and so of the convolution's inputs.
        matrix_dtype: of the matrices.
    """

    layers: tuple[int, ...]
    conv_channels: int
    conv_inputs: int
    delta: DeltaShape | None
    dtype: torch.dtype
    matrix_dtype: torch.dtype

    @property
    def conv_size(self) -> tuple[int, ...]:
        return (self.conv_channels, self.conv_inputs)

    @property
    def matrix_size(self) -> tuple[int, ...] | None:
        delta = self.delta
        return None if delta is None else (delta.heads, delta.d_k, delta.d_v)

    @property
    def bytes_per_node(self) -> int:
        """Bytes that a verification keeps of one node (`layers/state/nodes.py`)."""
        delta, kept = self.delta, self.conv_channels * self.dtype.itemsize
        if delta is not None:
            per_node = delta.key_heads * delta.d_k + delta.heads * (delta.d_v + 1)
            kept += per_node * torch.float32.itemsize
        return len(self.layers) * kept

    @property
    def bytes_per_slot(self) -> int:
        conv = self.conv_channels * self.conv_inputs * self.dtype.itemsize
        matrix = 0
        if self.delta is not None:
            delta = self.delta
            matrix = delta.heads * delta.d_k * delta.d_v * self.matrix_dtype.itemsize
        return len(self.layers) * (conv + matrix)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """One layer's states, views of the pool.

    Fields:
        conv: [slots, C, W - 1]. matrix: [slots, H, d_k, d_v], or None.
        conv_folded, matrix_folded: int32 [slots]; how many tokens the operations have
            folded into each.
    """

    conv: Tensor
    matrix: Tensor | None
    conv_folded: Tensor
    matrix_folded: Tensor


class StatePool:
    """States of `size` slots besides scratch.

    Fields:
        conv: [slots, layers, C, W - 1]; matrix: [slots, layers, H, d_k, d_v] or None.
            A slot is contiguous, so that copying it is one run.
        folded: int32 [slots, 2 * layers], or [slots, layers] without matrices: tokens
            folded into the convolution and the matrices of each layer, counted by the
            operations where they store.
    """

    def __init__(
        self, shape: StateShape, *, size: int, device: str | torch.device
    ) -> None:
        self.shape = shape
        self.size = size
        slots, layers = size + 1, len(shape.layers)
        self.conv = torch.zeros(
            (slots, layers, *shape.conv_size), dtype=shape.dtype, device=device
        )
        self.matrix: Tensor | None = None
        if shape.matrix_size is not None:
            self.matrix = torch.zeros(
                (slots, layers, *shape.matrix_size),
                dtype=shape.matrix_dtype,
                device=device,
            )
        parts = 1 if self.matrix is None else 2
        self.folded = torch.zeros(
            (slots, parts * layers), dtype=torch.int32, device=device
        )
        self._on_copy: list[Callable[[Tensor, Tensor], None]] = []
        self._layers = {
            layer: LayerState(
                conv=self.conv[:, i],
                matrix=None if self.matrix is None else self.matrix[:, i],
                conv_folded=self.folded[:, parts * i],
                matrix_folded=self.folded[:, parts * i + parts - 1],
            )
            for i, layer in enumerate(shape.layers)
        }

    def layer(self, layer_id: int) -> LayerState:
        return self._layers[layer_id]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def copy(self, copies: StateCopies) -> None:
        """Copy slots on the current stream."""
        for tensor in self._tensors():
            copy_slots(tensor, dst=copies.dst, src=copies.src)
        for hook in self._on_copy:
            hook(copies.dst, copies.src)

    def register_on_copy(self, hook: Callable[[Tensor, Tensor], None]) -> None:
        """Call `hook(dst, src)` after each copy, on the same stream, so that records
        about slots can follow the bytes."""
        self._on_copy.append(hook)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return everything that a slot has, by name; each [slots, ...]."""
        names = (
            ("conv", "folded") if self.matrix is None else ("conv", "matrix", "folded")
        )
        return list(zip(names, self._tensors(), strict=True))

    def bytes(self) -> list[Tensor]:
        """Return the states of all slots as uint8 [slots, layers, ...]."""
        return [
            part.view(torch.uint8) for name, part in self.named() if name != "folded"
        ]

    def _tensors(self) -> list[Tensor]:
        matrix = [] if self.matrix is None else [self.matrix]
        return [self.conv, *matrix, self.folded]
