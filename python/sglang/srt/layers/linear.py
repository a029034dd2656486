"""Linear layers and their weight loaders.

A parameter that packs several checkpoint tensors (q, k and v; gate and up) knows where
each of them goes: its `weight_loader(tensor, shard)` is the whole story of loading.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.activation import silu_and_mul
from sglang.srt.layers.ops.linear import (
    PackedWeight,
    linear,
    linear_silu_and_mul,
    pack_weight,
)


class LoadableParameter(nn.Parameter):
    """A parameter with named row intervals.

    `shards` maps the shard names of a packed parameter to their row interval
    `[start, stop)`; it is empty for a parameter that is one checkpoint tensor.
    """

    shards: Mapping[str, tuple[int, int]]

    @classmethod
    def create(
        cls, data: Tensor, shards: Mapping[str, tuple[int, int]] | None = None
    ) -> LoadableParameter:
        parameter = cls(data, requires_grad=False)
        parameter.shards = shards or {}
        return parameter

    def load(self, name: str, tensor: Tensor, shard: str | None) -> None:
        """Copy a checkpoint tensor into this parameter, or into one shard of it.

        Raises:
            ValueError: the shapes differ; names the tensor and both shapes.
        """
        target = self.data
        if shard is not None:
            start, stop = self.shards[shard]
            target = target[start:stop]
        if target.shape != tensor.shape:
            raise ValueError(
                f"checkpoint tensor {name} has shape {tuple(tensor.shape)}, but "
                f"config.json makes it {tuple(target.shape)}"
            )
        target.copy_(tensor)


class Linear(Module):
    """y = x W^T + b, with W packed for the CPU once the weights are loaded.

    Args:
        input_size, output_size: channels.
        bias: whether there is a bias [output_size].
        shards: sizes of the checkpoint tensors that make up the output rows, in order.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        shards: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        intervals = _intervals(shards or {})
        self.weight: LoadableParameter | None = LoadableParameter.create(
            torch.empty(output_size, input_size), intervals
        )
        self.bias: LoadableParameter | None = None
        if bias:
            self.bias = LoadableParameter.create(torch.empty(output_size), intervals)
        self._packed: PackedWeight | None = None

    def process_weights_after_loading(self) -> None:
        """Pack the weight where the CPU computes in float32; the plain copy goes."""
        weight = self.weight
        if weight is not None and weight.is_cpu and weight.dtype == torch.float32:
            self._packed = pack_weight(weight.data)
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., input_size] -> [..., output_size]."""
        return linear(x, self._any_weight(), self.bias)

    def _any_weight(self) -> Tensor | PackedWeight:
        weight = self._packed if self._packed is not None else self.weight
        assert weight is not None
        return weight


class QKVLinear(Linear):
    """q, k and v in one product: rows are `[q | k | v]`."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
    ) -> None:
        sizes = {
            "q": num_heads * head_dim,
            "k": num_kv_heads * head_dim,
            "v": num_kv_heads * head_dim,
        }
        super().__init__(hidden_size, sum(sizes.values()), bias=bias, shards=sizes)


class GateUpLinear(Linear):
    """gate and up in one product: rows are `[gate | up]`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__(
            hidden_size,
            2 * intermediate_size,
            bias=bias,
            shards={"gate": intermediate_size, "up": intermediate_size},
        )

    def forward_silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(gate(x)) * up(x): [T, hidden_size] -> [T, intermediate_size]."""
        if self.bias is not None:
            return silu_and_mul(self.forward(x))
        return linear_silu_and_mul(x, self._any_weight())


def _intervals(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    intervals, start = {}, 0
    for name, size in sizes.items():
        intervals[name] = (start, start + size)
        start += size
    return intervals
