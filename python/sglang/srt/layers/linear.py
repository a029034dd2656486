"""Linear layers, split over the tensor parallel ranks, and their weight loaders.

A parameter that packs several checkpoint tensors (q, k and v; gate and up) knows where
each one goes and which part this rank holds; `load(name, tensor, shard)` copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from sglang.srt.distributed.parallel_state import Addend, get_tp_group
from sglang.srt.distributed.partition import Part, divide, divide_kv_heads
from sglang.srt.layers.adapters import JoinedWeight, LayerAdapters, current_tiles
from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.linear.op import (
    AnyWeight,
    PackedWeight,
    linear,
    linear_add,
    linear_gated,
    linear_into,
    pack_weight,
)
from sglang.srt.layers.ops.linear.quantized import QuantizedPanels
from sglang.srt.layers.quantization import (
    forget_parts,
    quantize_parameter,
    quantized_weight,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from sglang.srt.layers.ops.linear.quantized import QuantizedWeight
    from sglang.srt.layers.quantization import Quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """`part` of a checkpoint tensor lies at `offset` of the parameter."""

    offset: int
    part: Part


class LoadableParameter(nn.Parameter):
    """A parameter that knows which checkpoint tensors make it up.

    `shards` maps their names to places along dimension `split_dim`, in order. A
    parameter that is a single checkpoint tensor has one entry, under None. `added` is
    added to the checkpoint's values in float32, before the only rounding to the dtype
    here. `quantizes` is set if these are the codes of a quantised weight. If it
    `is_common`, each of its checkpoint tensors holds all of it, and they are equal.
    """

    added: float = 0.0
    quantizes: Quantized | None = None
    is_common: bool = False
    split_dim: int
    shards: Mapping[str | None, Shard]

    @classmethod
    def create(
        cls,
        data: Tensor,
        parts: Mapping[str | None, Part] | None = None,
        *,
        dim: int = 0,
    ) -> LoadableParameter:
        """Create a parameter from `parts` of tensors along `dim`, or from one tensor if
        it is None."""
        parameter = cls(data, requires_grad=False)
        parameter.split_dim = dim
        parameter.shards = make_shards(parts or {None: Part.whole(data.shape[dim])})
        return parameter

    def like(self, data: Tensor, *, columns: int | None = 1) -> Self:
        """Return a parameter made up of the same checkpoint tensors, with other data
        for each row.

        Args:
            data: has an entry per `columns` columns of this one, or per row if None.

        Raises:
            ValueError: the part of this rank cuts an entry.
        """
        made = type(self)(data, requires_grad=False)
        made.__dict__.update(self.__dict__)
        if columns != 1 and self.split_dim == self.dim() - 1:
            made.set_parts(
                lambda part: Part.whole(1) if columns is None else part.divided(columns)
            )
        return made

    def set_parts(self, change: Callable[[Part], Part]) -> None:
        """Replace the part of each shard."""
        self.shards = change_parts(self.shards, change)

    def full_shape(self) -> tuple[int, ...]:
        """The shape that this parameter has without tensor parallelism."""
        full = sum(shard.part.full for shard in self.shards.values())
        return _with_size(self.shape, self.split_dim, full)

    def load(self, name: str, tensor: Tensor, shard: str | None) -> None:
        """Copy this rank's part of a checkpoint tensor to its place.

        Raises:
            ValueError: the shapes differ. The message names the tensor and both shapes.
        """
        if self.is_common:
            self._load_common(name, tensor)
            return
        if self.added:
            tensor = tensor.float() + self.added
        copy_part(self.data, name, tensor, self.shards[shard], dim=self.split_dim)

    def _load_common(self, name: str, tensor: Tensor) -> None:
        check_shape(name, tensor, tuple(self.shape))
        given = tensor.to(self.device)
        if bool((self.data != -1).any()) and not torch.equal(self.data, given):
            raise ValueError(
                f"checkpoint tensor {name} orders inputs unlike the other weights that "
                "are multiplied with it"
            )
        self.data.copy_(given)

    def covered_by(self, shard: str | None) -> Iterable[str | None]:
        """Return the `shards` that a checkpoint tensor of this name fills; empty if it
        has no place here."""
        return (shard,) if shard in self.shards else ()

    def load_full(self, name: str, tensor: Tensor) -> None:
        """Load all shards from a tensor of `full_shape`."""
        start = 0
        for shard, place in self.shards.items():
            full = place.part.full
            self.load(name, tensor.narrow(self.split_dim, start, full), shard)
            start += full


def copy_part(
    target: Tensor, name: str, tensor: Tensor, place: Shard, *, dim: int
) -> None:
    """Copy this rank's part, along `dim`, of a checkpoint tensor to its place.

    Raises:
        ValueError: the shapes differ. The message names the tensor and both shapes.
    """
    part = place.part
    check_shape(name, tensor, _with_size(target.shape, dim, part.full))
    if tensor.dtype != target.dtype and 1 in (tensor.itemsize, target.itemsize):
        raise ValueError(
            f"checkpoint tensor {name} is {tensor.dtype}, which is only read if "
            "config.json describes it in quantization_config"
        )
    kept = tensor.narrow(dim, part.start, part.size)
    target.narrow(dim, place.offset, part.size).copy_(kept)


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Check the shape of a checkpoint tensor.

    Raises:
        ValueError: it differs. The message names the tensor and both shapes.
    """
    if tensor.shape != expected:
        raise ValueError(
            f"checkpoint tensor {name} has shape {tuple(tensor.shape)}, but "
            f"config.json makes it {expected}"
        )


def _with_size(shape: torch.Size, dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


class Linear(Module):
    """y = x W^T + b, with W packed for the CPU once the weights are loaded.

    Args:
        is_plain: the weight is never quantised.

    Attributes:
        takes_adapters: whether this kind of layer can have adapters.
        adapters: its adapters, or None if it cannot have any in this server.
        shards, split_dim: those of the weight, which may be gone after loading.
    """

    takes_adapters = False

    def __init__(
        self,
        weight: LoadableParameter,
        bias: LoadableParameter | None,
        *,
        is_plain: bool = False,
    ) -> None:
        super().__init__()
        self.weight: LoadableParameter | None = weight
        self.weight_scale: LoadableParameter | None = None
        self.bias = bias
        self.shards, self.split_dim = weight.shards, weight.split_dim
        self.full_shape = weight.full_shape()
        self.adapters: LayerAdapters | None = None
        self._packed: PackedWeight | None = None
        self._quantized: QuantizedWeight | QuantizedPanels | None = None
        if not is_plain:
            quantize_parameter(self, "weight")

    def process_weights_after_loading(self) -> None:
        """Pack the weight if the CPU computes in float32, and drop the plain copy."""
        weight = self.weight
        if weight is None:
            return
        found = quantized_weight(self, "weight")
        if found is not None:
            forget_parts(self, "weight")
            self._quantized = found
            if weight.is_cpu:
                self._quantized = QuantizedPanels.pack(found)
                self.weight = None
        elif weight.is_cpu and weight.dtype == torch.float32:
            self._packed = pack_weight(weight.data)
            self.weight = None

    @property
    def packed(self) -> PackedWeight | None:
        """The packed weight, or None if it was not packed."""
        return self._packed

    @property
    def quantized(self) -> QuantizedWeight | QuantizedPanels | None:
        """The quantised weight, or None if the weight is plain."""
        return self._quantized

    def move_packed(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Replace the packed weight, if there is one, by a copy made by `copy`."""
        if self._packed is not None:
            self._packed = replace(self._packed, data=copy(self._packed.data))

    def forward(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[..., inputs] -> [..., outputs], written to `out` if given."""
        return self._multiply(x, self.bias, out=out)

    def _multiply(
        self, x: Tensor, bias: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """`linear`, with the adapters of this forward if a token has one."""
        weight, adapters = self._any_weight(), self.adapters
        tiles = None if adapters is None else current_tiles()
        if adapters is None or tiles is None:
            return linear(x, weight, bias, out=out)
        return adapters.linear(x, weight, bias, tiles, out=out)

    @property
    def _is_adapting(self) -> bool:
        """Whether a token of this forward may have an adapter here."""
        return self.adapters is not None and current_tiles() is not None

    def extended(self, rows: int) -> JoinedWeight:
        """Move the plain weight into a larger matrix, with `rows` rows of zeros behind
        its own, and return that."""
        weight, bias = self.weight, self.bias
        assert weight is not None
        outputs, inputs = weight.shape
        joined = weight.data.new_zeros(outputs + rows, inputs)
        joined[:outputs].copy_(weight.data)
        weight.data = joined[:outputs]
        padded = None if bias is None else functional.pad(bias.data, (0, rows))
        return JoinedWeight(joined, padded)

    def _any_weight(self) -> AnyWeight:
        weight = self._packed or self._quantized
        if weight is not None:
            return weight
        assert self.weight is not None
        return self.weight


class ColumnParallelLinear(Linear):
    """Each rank computes its part of the outputs from all inputs.

    Args:
        input_size: channels.
        outputs: this rank's part of each checkpoint tensor's rows, in order.
        bias: whether there is a bias, split like the outputs.
    """

    def __init__(
        self, input_size: int, outputs: Mapping[str | None, Part], *, bias: bool
    ) -> None:
        size = sum(part.size for part in outputs.values())
        super().__init__(
            LoadableParameter.create(torch.empty(size, input_size), outputs),
            LoadableParameter.create(torch.empty(size), outputs) if bias else None,
        )


class RowParallelLinear(Linear):
    """Each rank multiplies its part of the inputs; the products are summed.

    The input is the output of a column-parallel layer on this rank. The bias is whole
    on every rank, and the first one adds it. Adapters are split by inputs too, so their
    products are summed with the others.

    Args:
        what: the field of config.json that decides `input_size`, for error messages.
    """

    takes_adapters = True

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool, what: str
    ) -> None:
        group = get_tp_group()
        part = divide(input_size, group, what=what)
        super().__init__(
            LoadableParameter.create(
                torch.empty(output_size, part.size), {None: part}, dim=1
            ),
            LoadableParameter.create(torch.empty(output_size)) if bias else None,
        )
        self._group = group
        self._adds_bias = bias and group.is_leader

    def forward(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[T, inputs of this rank] -> [T, output_size], the same on all ranks."""
        return self._group.all_reduce(self.forward_partial(x, out=out))

    def forward_partial(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return this rank's product, for a caller that sums over ranks itself."""
        return self._multiply(x, self.bias if self._adds_bias else None, out=out)

    def add_partial(self, x: Tensor, total: Tensor) -> Tensor:
        """total [T, output_size] += this rank's product without a bias, in place."""
        if self._is_adapting:
            return total.add_(self._multiply(x, None))
        return linear_add(x, self._any_weight(), total)

    def forward_into(self, x: Tensor, residual: Tensor | None) -> Addend | None:
        """Add the product to `residual` [T, output_size] if that costs nothing extra.

        Returns:
            None if it was added. Otherwise, and without a `residual`, the product,
            which the caller has to add.
        """
        if self._group.size > 1:
            return self._group.sum_later(self.forward_partial(x))
        if residual is None or self._is_adapting:
            return self.forward(x)
        return linear_into(x, self._any_weight(), self.bias, residual)


class QKVLinear(ColumnParallelLinear):
    """q, k and v in one product: rows are `[q | k | v]` of this rank's heads.

    Attributes:
        num_heads, num_kv_heads: heads of this rank.
    """

    takes_adapters = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
    ) -> None:
        group = get_tp_group()
        heads = divide(num_heads, group, what="num_attention_heads")
        kv_heads = divide_kv_heads(num_kv_heads, group)
        q, kv = heads.scaled(head_dim), kv_heads.scaled(head_dim)
        super().__init__(hidden_size, {"q": q, "k": kv, "v": kv}, bias=bias)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size


class GateUpLinear(ColumnParallelLinear):
    """gate and up in one product: rows are `[gate | up]` of this rank's channels.

    Args:
        what: the field of config.json that decides `intermediate_size`, for errors.
    """

    takes_adapters = True

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        what: str = "intermediate_size",
    ) -> None:
        part = divide(intermediate_size, get_tp_group(), what=what)
        super().__init__(hidden_size, {"gate": part, "up": part}, bias=bias)

    def forward_silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(gate(x)) * up(x): [T, hidden_size] -> [T, channels of this rank]."""
        return self.forward_gated(x, "silu")

    def forward_gated(self, x: Tensor, activation: str) -> Tensor:
        """activation(gate(x)) * up(x), for an activation of `GATED`."""
        weight, bias, adapters = self._any_weight(), self.bias, self.adapters
        tiles = None if adapters is None else current_tiles()
        if adapters is not None and tiles is not None:
            return adapters.linear_gated(x, weight, bias, tiles, activation)
        if bias is None:
            return linear_gated(x, weight, activation)
        return GATED[activation](linear(x, weight, bias))


def change_parts(
    shards: Mapping[str | None, Shard], change: Callable[[Part], Part]
) -> dict[str | None, Shard]:
    return make_shards({name: change(shard.part) for name, shard in shards.items()})


def make_shards(parts: Mapping[str | None, Part]) -> dict[str | None, Shard]:
    shards, offset = {}, 0
    for name, part in parts.items():
        shards[name] = Shard(offset=offset, part=part)
        offset += part.size
    return shards
