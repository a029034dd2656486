"""Weights whose checkpoint tensors hold several shards each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.layers.linear import (
    Linear,
    LoadableParameter,
    check_shape,
    make_shards,
)

if TYPE_CHECKING:
    from sglang.srt.distributed.partition import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """How the rows of a checkpoint tensor are made up of shards.

    Fields:
        shards: shards in the tensor.
        groups: the tensor is this many groups of equal size, and each of them has an
            equal part of every shard, in order.
    """

    shards: tuple[str | None, ...]
    groups: int = 1


class JoinedParameter(LoadableParameter):
    """A parameter that `joined` checkpoint tensors make up, besides tensors of a single
    shard."""

    joined: Mapping[str | None, Joined]

    @classmethod
    def join(
        cls,
        data: Tensor,
        parts: Mapping[str | None, Part],
        joined: Mapping[str | None, Joined],
    ) -> JoinedParameter:
        """Create a parameter from `parts` of shards along the first dimension."""
        parameter = cls(data, requires_grad=False)
        parameter.split_dim = 0
        parameter.shards = make_shards(parts)
        parameter.joined = joined
        return parameter

    def covered_by(self, shard: str | None) -> Iterable[str | None]:
        joined = self.joined.get(shard)
        return super().covered_by(shard) if joined is None else joined.shards

    def load(self, name: str, tensor: Tensor, shard: str | None) -> None:
        """Copy this rank's part of one shard, or of all shards in a joined tensor.

        Raises:
            ValueError: as `LoadableParameter.load`.
        """
        joined = None if self.is_common else self.joined.get(shard)
        if joined is None:
            super().load(name, tensor, shard)
            return
        full = [self.shards[each].part.full for each in joined.shards]
        check_shape(name, tensor, (sum(full), *self.shape[1:]))
        groups = tensor.unflatten(0, (joined.groups, -1))
        sizes = [rows // joined.groups for rows in full]
        for each, rows in zip(
            joined.shards, groups.split_with_sizes(sizes, dim=1), strict=True
        ):
            super().load(name, rows.flatten(0, 1), each)


class JoinedLinear(Linear):
    """A `ColumnParallelLinear` with `joined` checkpoint tensors.

    Args:
        input_size: channels.
        outputs: this rank's part of each shard's rows, in order.
        bias: whether there is a bias, split and joined like the outputs.
    """

    def __init__(
        self,
        input_size: int,
        outputs: Mapping[str | None, Part],
        joined: Mapping[str | None, Joined],
        *,
        bias: bool,
    ) -> None:
        size = sum(part.size for part in outputs.values())
        weight = JoinedParameter.join(torch.empty(size, input_size), outputs, joined)
        super().__init__(
            weight,
            JoinedParameter.join(torch.empty(size), outputs, joined) if bias else None,
        )
