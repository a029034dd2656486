"""Triton kernel of the routing; `op.py` describes it."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.layers.ops.linear.op import PackedWeight
from sglang.srt.layers.ops.moe_routing.op import TINY as _TINY
from sglang.srt.layers.ops.moe_routing.op import RoutingRule, router_logits_ref
from sglang.srt.utils.triton_launch import (
    Scratch,
    block_of,
    launch_options,
    let_next_start,
    wait_for_inputs,
)

TINY = tl.constexpr(_TINY)
CHOICE_BLOCK = 2048
"""Inputs that a program of `choose_kernel` multiplies at once."""
CHOICE_EXPERTS = 1024
"""To choose more experts than this takes a separate launch."""
_SCRATCH = Scratch(partial_bytes=4 * CHOICE_EXPERTS, counters=1)
LOWEST = tl.constexpr(-3.4e38)  # lowest choosable value; all else is minus infinity


class Rule(NamedTuple):
    """`RoutingRule` for a number of experts; the argument RULE.

    Fields:
        experts_block, top_k_block, groups_block: counts rounded up to powers of two.
        group_size: experts per group.
    """

    experts: int
    experts_block: int
    top_k: int
    top_k_block: int
    is_sigmoid: bool
    renormalise: bool
    groups: int
    groups_block: int
    group_size: int
    top_groups: int
    group_best: int


@triton.jit
def first_largest(values, index, BLOCK: tl.constexpr):
    """Return (the largest of `values` [BLOCK], its lowest index)."""
    largest = tl.max(values, axis=0)
    return largest, tl.min(tl.where(values == largest, index, BLOCK), axis=0)


@triton.jit
def _limit_to_groups(choice, expert, RULE: tl.constexpr):
    """Set the experts outside the best groups to minus infinity."""
    GROUPS: tl.constexpr = RULE.groups
    GROUPS_BLOCK: tl.constexpr = RULE.groups_block
    GROUP_BEST: tl.constexpr = RULE.group_best
    TOP_GROUPS: tl.constexpr = RULE.top_groups
    group = tl.arange(0, GROUPS_BLOCK)
    best = tl.full([GROUPS_BLOCK], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        rest = tl.where(expert // RULE.group_size == g, choice, float("-inf"))
        total = 0.0
        for _ in tl.static_range(GROUP_BEST):
            value, place = first_largest(rest, expert, RULE.experts_block)
            total += value
            rest = tl.where(expert == place, float("-inf"), rest)
        best = tl.where(group == g, tl.maximum(total, LOWEST), best)
    kept = tl.zeros_like(expert)
    for _ in tl.static_range(TOP_GROUPS):
        _value, place = first_largest(best, group, GROUPS_BLOCK)
        kept = tl.where(expert // RULE.group_size == place, 1, kept)
        best = tl.where(group == place, float("-inf"), best)
    return tl.where(kept == 1, choice, float("-inf"))


@triton.jit
def _choose(value, correction, weights, ids, scale, RULE: tl.constexpr):
    """Write the choice for one token's logits, [experts_block]. `correction` may be
    None; `weights` and `ids` point to the token's first entry."""
    EXPERTS: tl.constexpr = RULE.experts_block
    expert = tl.arange(0, EXPERTS)
    inside = expert < RULE.experts
    if RULE.is_sigmoid:
        score = 1.0 / (1.0 + tl.exp(-value))
        choice = score
    else:
        score = tl.exp(value - tl.max(value, axis=0))
        choice = value
    score = tl.where(inside, score, 0.0)
    if correction is not None:
        choice += tl.load(correction + expert, mask=inside, other=0.0)
    choice = tl.where(choice != choice, float("inf"), choice)
    choice = tl.where(inside, tl.maximum(choice, LOWEST), float("-inf"))
    if RULE.groups > 1:
        choice = _limit_to_groups(choice, expert, RULE)
    TOP_K: tl.constexpr = RULE.top_k
    SLOTS: tl.constexpr = RULE.top_k_block
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], dtype=tl.float32)
    chosen_ids = tl.zeros([SLOTS], dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        _value, place = first_largest(choice, expert, EXPERTS)
        weight = tl.sum(tl.where(expert == place, score, 0.0), axis=0)
        chosen = tl.where(slot == k, weight, chosen)
        chosen_ids = tl.where(slot == k, place, chosen_ids)
        choice = tl.where(expert == place, float("-inf"), choice)
    if RULE.renormalise:
        chosen /= tl.sum(chosen, axis=0) + TINY
    elif not RULE.is_sigmoid:
        chosen /= tl.sum(score, axis=0)
    tl.store(weights + slot, chosen * scale, mask=slot < RULE.top_k)
    tl.store(ids + slot, chosen_ids, mask=slot < RULE.top_k)


@triton.jit
def route_kernel(
    logits, correction, weights, ids, scale, RULE: tl.constexpr, PDL: tl.constexpr
):
    """Route one token per program."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, RULE.experts_block)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    at = logits + token * RULE.experts + expert
    value = tl.load(at, mask=expert < RULE.experts, other=float("-inf"))
    weights += token * RULE.top_k
    ids += token * RULE.top_k
    _choose(value, correction, weights, ids, scale, RULE)


@triton.jit
def choose_kernel(
    x,
    weight,
    bias,
    correction,
    logits,
    counter,
    weights,
    ids,
    scale,
    RULE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Route one token: one program per expert multiplies, the last to arrive chooses.

    x [HIDDEN], weight [experts, HIDDEN]; bias, correction: [experts] or None; logits:
    [experts] float32 scratch; counter: zero before and after.
    """
    mine = tl.program_id(0)
    let_next_start(PDL)
    k = tl.arange(0, BLOCK_K)
    start = weight + mine.to(tl.int64) * HIDDEN
    ahead = tl.load(start + k, mask=k < HIDDEN, other=0.0)
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK_K], dtype=tl.float32)
    for first in range(0, HIDDEN, BLOCK_K):
        current = ahead
        here = first + k
        later = here + BLOCK_K
        ahead = tl.load(start + later, mask=later < HIDDEN, other=0.0)
        value = tl.load(x + here, mask=here < HIDDEN, other=0.0).to(tl.float32)
        total += current.to(tl.float32) * value
    logit = tl.sum(total, axis=0)
    if bias is not None:
        logit += tl.load(bias + mine)
    tl.store(logits + mine, logit)
    # All threads store before one thread announces it.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == RULE.experts - 1:
        tl.store(counter, 0)
        expert = tl.arange(0, RULE.experts_block)
        value = tl.load(
            logits + expert,
            mask=expert < RULE.experts,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        _choose(value, correction, weights, ids, scale, RULE)


def kernel_rule(rule: RoutingRule, num_experts: int) -> Rule:
    return Rule(
        experts=num_experts,
        experts_block=block_of(num_experts),
        top_k=rule.top_k,
        top_k_block=block_of(rule.top_k),
        is_sigmoid=rule.is_sigmoid,
        renormalise=rule.renormalise,
        groups=rule.groups,
        groups_block=block_of(rule.groups),
        group_size=num_experts // rule.groups,
        top_groups=rule.top_groups,
        group_best=rule.group_best,
    )


def route(
    logits: Tensor, rule: RoutingRule, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`ops.moe_routing.route`."""
    tokens, experts = logits.shape
    rule.check(experts)
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(
            f"route: logits are {logits.dtype} {tuple(logits.shape)}, expected "
            "contiguous float32"
        )
    weights = logits.new_empty(tokens, rule.top_k)
    ids = torch.empty_like(weights, dtype=torch.int32)
    if tokens == 0:
        return weights, ids
    route_kernel[(tokens,)](
        logits,
        correction,
        weights,
        ids,
        rule.scale,
        RULE=kernel_rule(rule, experts),
        num_warps=1 if experts <= 128 else 4,
        **launch_options(logits.device),
    )
    return weights, ids


def router_logits(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None
) -> Tensor:
    """`ops.moe_routing.router_logits`: cuBLAS, which can return float32 sums."""
    if isinstance(weight, PackedWeight) or x.dtype == torch.float32 or not x.is_cuda:
        return router_logits_ref(x, weight, bias)
    logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)


def choose_experts(
    x: Tensor,
    weight: Tensor | PackedWeight,
    rule: RoutingRule,
    *,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.moe_routing.choose_experts`; a single token takes one launch."""
    if (
        x.shape[0] != 1
        or isinstance(weight, PackedWeight)
        or weight.shape[0] > CHOICE_EXPERTS
        or not weight.is_contiguous()
    ):
        return route(router_logits(x, weight, bias), rule, correction)
    experts, hidden = weight.shape
    rule.check(experts)
    if weight.dtype != x.dtype or x.shape[1] != hidden:
        raise ValueError(
            f"choose_experts: x is {x.dtype} {tuple(x.shape)}, weight {weight.dtype} "
            f"{tuple(weight.shape)}; dtypes and the last dimensions must be equal"
        )
    weights = torch.empty(1, rule.top_k, dtype=torch.float32, device=x.device)
    ids = torch.empty_like(weights, dtype=torch.int32)
    scratch, counters = _SCRATCH.get(x.device, partial_bytes=4 * experts, counters=1)
    choose_kernel[(experts,)](
        x.contiguous(),
        weight,
        bias,
        correction,
        scratch.view(torch.float32),
        counters,
        weights,
        ids,
        rule.scale,
        RULE=kernel_rule(rule, experts),
        HIDDEN=hidden,
        BLOCK_K=min(block_of(hidden), CHOICE_BLOCK),
        # Each warp has one row of the weight, and reduces it without a barrier.
        num_warps=1,
        **launch_options(x.device),
    )
    return weights, ids
