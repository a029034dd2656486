"""Weights of the experts of a layer, split over the ranks by intermediate size.

Checkpoints have one tensor per expert and projection, or stack the experts of a layer;
`StackLayout` says how. Knows nothing about routing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.distributed.partition import Part, divide
from sglang.srt.layers.linear import (
    LoadableParameter,
    Shard,
    change_parts,
    copy_part,
    make_shards,
)
from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.moe.op import (
    ExpertWeights,
    SwiGLUClamp,
    moe_experts,
    pack_experts,
)
from sglang.srt.layers.quantization import (
    forget_parts,
    quantize_parameter,
    quantized_weight,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayout:
    """How a checkpoint stacks the experts of a layer in one tensor.

    Fields:
        is_transposed: matrices are [E, inputs, outputs] instead of [E, outputs,
            inputs].
        is_interleaved: outputs of gate and up alternate; else the gate's come first.
    """

    is_transposed: bool = False
    is_interleaved: bool = False


class ExpertParameter(LoadableParameter):
    """A parameter [E, ...]. For each expert one or several tensors make it up.

    Its shards are "3.gate" (part `gate` of expert 3), or "3" if an expert has a single
    tensor. None stands for a stack of all experts.
    """

    parts: Mapping[str | None, Shard]
    stacked: StackLayout

    @classmethod
    def stack(
        cls,
        data: Tensor,
        parts: Mapping[str | None, Part],
        *,
        dim: int = 0,
        layout: StackLayout,
    ) -> ExpertParameter:
        """Create a parameter from the `parts` of each expert's tensors along `dim`."""
        parameter = cls(data, requires_grad=False)
        parameter.split_dim = dim + 1
        parameter.stacked = layout
        parameter._name_shards(make_shards(parts))
        return parameter

    def set_parts(self, change: Callable[[Part], Part]) -> None:
        self._name_shards(change_parts(self.parts, change))

    def _name_shards(self, parts: Mapping[str | None, Shard]) -> None:
        self.parts = parts
        self.shards = {
            str(expert) if part is None else f"{expert}.{part}": place
            for expert in range(self.shape[0])
            for part, place in parts.items()
        }

    def full_shape(self) -> tuple[int, ...]:
        full = sum(place.part.full for place in self.parts.values())
        shape = list(self.shape)
        shape[self.split_dim] = full
        return tuple(shape)

    def covered_by(self, shard: str | None) -> Iterable[str | None]:
        return self.shards if shard is None else super().covered_by(shard)

    def load(self, name: str, tensor: Tensor, shard: str | None) -> None:
        """Copy this rank's part of one expert's tensor, or of a stack.

        Raises:
            ValueError: as `LoadableParameter.load`.
        """
        if shard is None:
            self._load_stack(name, tensor, self.stacked)
            return
        expert, _, part = shard.partition(".")
        target = self.data[int(expert)]
        place = self.parts[part or None]
        copy_part(target, name, tensor, place, dim=self.split_dim - 1)

    def load_full(self, name: str, tensor: Tensor) -> None:
        self._load_stack(name, tensor, StackLayout())

    def _load_stack(self, name: str, tensor: Tensor, layout: StackLayout) -> None:
        if layout.is_transposed and self.dim() == 3:
            tensor = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        if tensor.shape != self.full_shape():
            raise ValueError(
                f"checkpoint tensor {name} has shape {tuple(tensor.shape)}, but "
                f"config.json makes it {self.full_shape()}"
                f"{' (transposed)' if layout.is_transposed else ''}"
            )
        start = 0
        for i, place in enumerate(self.parts.values()):
            full = place.part.full
            if layout.is_interleaved:
                kept = _every(tensor, len(self.parts), i, dim=self.split_dim)
            else:
                kept = tensor.narrow(self.split_dim, start, full)
            copy_part(self.data, name, kept, place, dim=self.split_dim)
            start += full


def _every(tensor: Tensor, step: int, first: int, *, dim: int) -> Tensor:
    """Return a view of the entries `first`, `first` + `step`, ... along `dim`."""
    split: Tensor = tensor.unflatten(dim, (-1, step))
    return split.select(dim + 1, first)


class Experts(Module):
    """The gated feed-forward blocks of a layer. Each rank holds a part of every block.

    Args:
        intermediate_size: channels of an expert.
        bias: whether the projections have biases. The bias of `down` is whole on every
            rank, and the first rank adds it.
        what: the field of config.json that gives `intermediate_size`, for errors.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        clamp: SwiGLUClamp | None = None,
        layout: StackLayout | None = None,
        what: str = "moe_intermediate_size",
    ) -> None:
        super().__init__()
        layout = layout or StackLayout()
        group = get_tp_group()
        part = divide(intermediate_size, group, what=what)
        halves: dict[str | None, Part] = {"gate": part, "up": part}
        self.gate_up_proj: ExpertParameter | None = ExpertParameter.stack(
            torch.empty(num_experts, 2 * part.size, hidden_size), halves, layout=layout
        )
        self.down_proj: ExpertParameter | None = ExpertParameter.stack(
            torch.empty(num_experts, hidden_size, part.size),
            {None: part},
            dim=1,
            layout=layout,
        )
        self.gate_up_proj_scale: ExpertParameter | None = None
        self.down_proj_scale: ExpertParameter | None = None
        quantize_parameter(self, "gate_up_proj")
        quantize_parameter(self, "down_proj")
        self.gate_up_proj_bias: ExpertParameter | None = None
        self.down_proj_bias: ExpertParameter | None = None
        if bias:
            whole: dict[str | None, Part] = {None: Part.whole(hidden_size)}
            self.gate_up_proj_bias = ExpertParameter.stack(
                torch.empty(num_experts, 2 * part.size), halves, layout=layout
            )
            self.down_proj_bias = ExpertParameter.stack(
                torch.empty(num_experts, hidden_size), whole, layout=StackLayout()
            )
        self._inner = part.size
        self._clamp = clamp
        self._adds_bias = group.is_leader
        self._weights: ExpertWeights | None = None

    def process_weights_after_loading(self) -> None:
        """Pack for the CPU and drop the plain copies."""
        assert self.gate_up_proj is not None and self.down_proj is not None
        bias, down_bias = self.gate_up_proj_bias, self.down_proj_bias
        gate_up = quantized_weight(self, "gate_up_proj")
        down = quantized_weight(self, "down_proj")
        plain = ExpertWeights(
            gate_up=self.gate_up_proj.data if gate_up is None else gate_up,
            down=self.down_proj.data if down is None else down,
            gate_up_bias=None if bias is None else bias.data,
            down_bias=(
                down_bias.data if down_bias is not None and self._adds_bias else None
            ),
            inner=self._inner,
            clamp=self._clamp,
        )
        self._weights = pack_experts(plain)
        if self._weights is not plain:
            self.gate_up_proj = self.down_proj = None
        forget_parts(self, "gate_up_proj")
        forget_parts(self, "down_proj")

    @property
    def bytes_of_one(self) -> int:
        """Return the stored size of one expert's matrices, in bytes."""
        weights = self.weights
        return (weights.gate_up.nbytes + weights.down.nbytes) // weights.count

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[T, H] with weights and ids [T, K] -> [T, H], to be summed over the ranks."""
        return moe_experts(x, weights, ids, self.weights)

    @property
    def weights(self) -> ExpertWeights:
        """The loaded weights, in the form that the operation reads."""
        assert self._weights is not None, "process_weights_after_loading was not called"
        return self._weights
