"""The layer that chooses each token's experts. Every rank holds all of it."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.layers.linear import LoadableParameter
from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.linear.op import PackedWeight, pack_weight
from sglang.srt.layers.ops.moe_routing.op import RoutingRule, choose_experts


class Router(Module):
    """Computes the logits of all experts in float32 and applies a routing rule.

    Args:
        bias: whether the logits have a bias.
        has_correction: whether there is `e_score_correction_bias`, which only affects
            the choice (DeepSeek-V3).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        rule: RoutingRule,
        *,
        bias: bool = False,
        has_correction: bool = False,
    ) -> None:
        super().__init__()
        rule.check(num_experts)
        self.weight: LoadableParameter | None = LoadableParameter.create(
            torch.empty(num_experts, hidden_size)
        )
        self.bias = _float_vector(num_experts) if bias else None
        self.e_score_correction_bias = (
            _float_vector(num_experts) if has_correction else None
        )
        self._rule = rule
        self._packed: PackedWeight | None = None

    def process_weights_after_loading(self) -> None:
        """Pack the weight on the CPU, in any dtype: the product is float32."""
        assert self.weight is not None
        if self.weight.is_cpu:
            self._packed = pack_weight(self.weight.data)
            self.weight = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> weights [T, top_k] float32 and ids [T, top_k] int32."""
        weight = self._packed if self._packed is not None else self.weight
        assert weight is not None
        return choose_experts(
            x,
            weight,
            self._rule,
            bias=self.bias,
            correction=self.e_score_correction_bias,
        )


def _float_vector(size: int) -> LoadableParameter:
    return LoadableParameter.create(torch.empty(size, dtype=torch.float32))
