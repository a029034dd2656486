"""Native form of expert routing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_kernels import ops

if TYPE_CHECKING:
    from sglang.srt.layers.ops.moe_routing.op import RoutingRule


def route(
    logits: Tensor, rule: RoutingRule, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rule.check(logits.shape[1])
    weights = logits.new_empty(logits.shape[0], rule.top_k)
    ids = torch.empty_like(weights, dtype=torch.int32)
    ops.moe_route(
        logits,
        correction,
        rule.top_k,
        rule.is_sigmoid,
        rule.renormalise,
        rule.scale,
        rule.groups,
        rule.top_groups,
        rule.group_best,
        weights,
        ids,
    )
    return weights, ids
