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
from sglang.srt.mem_cache.state_sums import StateSums

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
        counts = self.parts * torch.int32.itemsize
        return len(self.layers) * (conv + matrix + counts)

    @property
    def parts(self) -> int:
        """Tensors of a layer, each with a count of what was folded into it."""
        return 1 if self.delta is None else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """One layer's states, views of the pool.

    Fields:
        conv: [slots, C, W - 1]. matrix: [slots, H, d_k, d_v], or None.
        conv_folded, matrix_folded: int32 [slots]; how many tokens the operations have
            folded into each.
        conv_sums, matrix_sums: checksums of both, or None.
    """

    conv: Tensor
    matrix: Tensor | None
    conv_folded: Tensor
    matrix_folded: Tensor
    conv_sums: StateSums | None = None
    matrix_sums: StateSums | None = None


class StatePool:
    """States of `size` slots besides scratch.

    Fields:
        conv: [slots, layers, C, W - 1]; matrix: [slots, layers, H, d_k, d_v] or None.
            A slot is contiguous, so that copying it is one run.
        folded: int32 [slots, 2 * layers], or [slots, layers] without matrices: tokens
            folded into the convolution and the matrices of each layer, counted by the
            operations where they store.
        conv_sums, matrix_sums: int64 [slots, layers, cells] checksums, or None; see
            `keep_sums`. marks: int32 [slots, layers], set where operations load what
            has other sums than were kept; or None.
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
        self.folded = torch.zeros(
            (slots, shape.parts * layers), dtype=torch.int32, device=device
        )
        self.conv_sums: Tensor | None = None
        self.matrix_sums: Tensor | None = None
        self.marks: Tensor | None = None
        self._on_copy: list[Callable[[Tensor, Tensor], None]] = []
        self._layers = self._views()

    def keep_sums(self, *, conv_cells: int, matrix_cells: int) -> None:
        """From now on operations keep checksums of the states that they store, so many
        for each slot and layer, and compare those that they load. All states are zeros
        still."""
        slots, layers = self.conv.shape[:2]

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.conv.device)

        self.conv_sums = zeros(slots, layers, conv_cells)
        if self.matrix is not None:
            self.matrix_sums = zeros(slots, layers, matrix_cells)
        self.marks = zeros(slots, layers, dtype=torch.int32)
        self._layers = self._views()

    def _views(self) -> dict[int, LayerState]:
        parts = self.shape.parts

        def sums(kept: Tensor | None, layer: int) -> StateSums | None:
            if kept is None:
                return None
            assert self.marks is not None
            return StateSums(kept=kept[:, layer], marks=self.marks[:, layer])

        return {
            layer: LayerState(
                conv=self.conv[:, i],
                matrix=None if self.matrix is None else self.matrix[:, i],
                conv_folded=self.folded[:, parts * i],
                matrix_folded=self.folded[:, parts * i + parts - 1],
                conv_sums=sums(self.conv_sums, i),
                matrix_sums=sums(self.matrix_sums, i),
            )
            for i, layer in enumerate(self.shape.layers)
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
        names = ("conv", "matrix", "folded", "conv_sums", "matrix_sums")
        tensors = ((name, getattr(self, name)) for name in names)
        return [(name, tensor) for name, tensor in tensors if tensor is not None]

    def with_sums(self) -> list[tuple[Tensor, Tensor]]:
        """Return the states of all slots with their checksums, if these are kept."""
        pairs = ((self.conv, self.conv_sums), (self.matrix, self.matrix_sums))
        return [
            (states, sums)
            for states, sums in pairs
            if states is not None and sums is not None
        ]

    def bytes(self) -> list[Tensor]:
        """Return the states of all slots as uint8 [slots, layers, ...]."""
        states = (self.conv, self.matrix)
        return [part.view(torch.uint8) for part in states if part is not None]

    def _tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self.named()]
