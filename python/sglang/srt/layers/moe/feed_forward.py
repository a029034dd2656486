"""Feed-forward blocks with experts: a router, the experts, and shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.distributed.parallel_state import Addend, get_tp_group
from sglang.srt.layers.linear import (
    GateUpLinear,
    Linear,
    LoadableParameter,
    RowParallelLinear,
)
from sglang.srt.layers.module import Module

if TYPE_CHECKING:
    from sglang.srt.layers.moe.experts import Experts
    from sglang.srt.layers.moe.router import Router


class SharedExpert(Module):
    """A gated MLP that every token takes; each rank has a part of its channels.

    Args:
        what: the field of config.json that gives `intermediate_size`, for errors.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, what: str) -> None:
        super().__init__()
        self.gate_up_proj = GateUpLinear(
            hidden_size, intermediate_size, bias=False, what=what
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=False, what=what
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H], to be summed over the ranks."""
        return self.down_proj.forward_partial(self._inner(x))

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """total [T, H] += the result for `x`, in place."""
        return self.down_proj.add_partial(self._inner(x), total)

    def _inner(self, x: Tensor) -> Tensor:
        return self.gate_up_proj.forward_silu_and_mul(x)


class MoeFeedForward(Module):
    """The weighted sum of each token's experts, plus what the shared expert adds.

    Module names follow Qwen's checkpoints.

    Args:
        top_k: experts per token.
        shared_expert: None if the layer has none.
        gates_shared: scale the shared expert by the sigmoid of a product.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        gate: Router,
        experts: Experts,
        top_k: int,
        shared_expert: SharedExpert | None = None,
        gates_shared: bool = False,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_expert = shared_expert
        self.shared_expert_gate: Linear | None = None
        if gates_shared:
            weight = LoadableParameter.create(torch.empty(1, hidden_size))
            self.shared_expert_gate = Linear(weight, None, is_plain=True)
        self._top_k = top_k
        self._group = get_tp_group()

    def forward(self, x: Tensor, residual: Tensor) -> Addend | None:
        """[T, H] -> [T, H], still to be added to `residual`."""
        out: Tensor = self.experts(x, *self.gate(x))
        if self.shared_expert_gate is not None:
            assert self.shared_expert is not None
            share = torch.sigmoid(self.shared_expert_gate(x))
            out.addcmul_(share, self.shared_expert(x))
        elif self.shared_expert is not None:
            self.shared_expert.add_to(out, x)
        return self._group.sum_later(out)

    @property
    def bytes_of_chosen_experts(self) -> int:
        """Return how many bytes of expert weights one token reads."""
        return self._top_k * self.experts.bytes_of_one
