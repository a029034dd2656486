"""Choice of the experts of each token, in float32.

Knows logits and rules; knows nothing of expert weights or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sglang.srt.layers.ops.linear.op import PackedWeight, linear
from sglang.srt.utils.dispatch import Op

_TRITON = "sglang.srt.layers.ops.moe_routing.triton:"

TINY = 1e-20
"""Added to a sum of scores before dividing by it, because all sigmoids may be zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How logits become a token's experts and their weights.

    Fields:
        top_k: experts per token.
        is_sigmoid: scores are sigmoids; else the softmax over all experts.
        renormalise: divide the chosen scores by their sum. A softmax over the chosen
            logits (gpt-oss) gives the same.
        scale: factor on the weights.
        groups, top_groups: experts are chosen from the best `top_groups` of `groups`
            groups of neighbours.
        group_best: score a group by the sum of this many of its best experts: 1
            (DeepSeek-V2) or, for sigmoids, 2 (DeepSeek-V3).
    """

    top_k: int
    is_sigmoid: bool = False
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1

    def check(self, num_experts: int) -> None:
        """Check that the rule fits `num_experts` experts.

        Raises:
            ValueError: it does not fit. The message names the rule.
        """
        size = num_experts // self.groups if self.groups > 0 else 0
        fits = (
            size > 0
            and size * self.groups == num_experts
            and 1 <= self.top_groups <= self.groups
            and 1 <= self.group_best <= size
            and 1 <= self.top_k <= self.top_groups * size
            and (self.is_sigmoid or self.group_best == 1)
        )
        if not fits:
            raise ValueError(f"{self} does not fit {num_experts} experts")


def router_logits_ref(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None
) -> Tensor:
    """Compute logits [T, E] in float32; the product is not rounded to the dtype of `x`.

    Args:
        x: [T, H]; float32, bfloat16 or float16.
        weight: [E, H] of the dtype of `x`, or packed. bias: [E] float32, or None.
    """
    if isinstance(weight, PackedWeight):
        return linear(x.float(), weight, bias)
    return functional.linear(x.float(), weight.float(), bias)


router_logits = Op(reference=router_logits_ref, triton=_TRITON + "router_logits")


def route_ref(
    logits: Tensor, rule: RoutingRule, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose `rule.top_k` experts per token, the best first.

    Among equals the lowest ids win. NaN counts as the best, so that ids are valid
    whatever the logits are. A softmax is ranked by its logits, so that all
    implementations choose alike; sigmoids that differ in the last bit may choose
    differently.

    Args:
        logits: [T, E] float32, contiguous.
        correction: [E] float32 or None, added to the sigmoids (or a softmax's logits)
            for the choice only.

    Returns:
        weights [T, top_k] float32, and ids [T, top_k] int32.
    """
    rule.check(logits.shape[1])
    scores = logits.sigmoid() if rule.is_sigmoid else logits.softmax(dim=-1)
    choice = scores if rule.is_sigmoid else logits
    if correction is not None:
        choice = choice + correction
    choice = choice.masked_fill(choice.isnan(), float("inf"))
    if rule.groups > 1:
        choice = _limit_to_groups(choice, rule)
    # A stable sort keeps equals in the order of their ids, which topk does not.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(1, ids)
    if rule.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return weights * rule.scale, ids.int()


def _limit_to_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    """Set the experts outside the best groups to minus infinity."""
    grouped: Tensor = choice.unflatten(1, (rule.groups, -1))
    best = grouped.topk(rule.group_best, dim=-1).values.sum(dim=-1)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    dropped = torch.ones_like(best, dtype=torch.bool)
    dropped.scatter_(1, order[:, : rule.top_groups], False)
    return grouped.masked_fill(dropped[..., None], float("-inf")).view_as(choice)


route = Op(
    reference=route_ref,
    native="sglang.srt.layers.ops.moe_routing.native:route",
    triton=_TRITON + "route",
)


def choose_experts_ref(
    x: Tensor,
    weight: Tensor | PackedWeight,
    rule: RoutingRule,
    *,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` of `router_logits`."""
    return route(router_logits(x, weight, bias), rule, correction)


choose_experts = Op(reference=choose_experts_ref, triton=_TRITON + "choose_experts")
