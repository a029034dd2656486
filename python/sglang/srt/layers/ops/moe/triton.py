"""Launches of the experts on a GPU; `op.py` describes the op.

Shapes and launches follow from the number of tokens alone and nothing waits for the
host, so that a forward can be captured. A single token needs no list of rows: each of
its experts is a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from torch import Tensor

from sglang.srt.layers.ops.linear.quantized import FORMATS
from sglang.srt.layers.ops.linear.triton_many import stored_weight
from sglang.srt.layers.ops.linear.triton_table import MIN_STEP
from sglang.srt.layers.ops.moe.op import ExpertWeights, SwiGLUClamp
from sglang.srt.layers.ops.moe.triton_kernels import (
    GroupedProduct,
    grouped_kernel,
    sum_kernel,
)
from sglang.srt.layers.ops.moe.triton_sort import sort_by_expert
from sglang.srt.layers.ops.moe.triton_table import BLOCK_K, block_rows, lookup
from sglang.srt.utils.triton_launch import Scratch, launch_options

if TYPE_CHECKING:
    from sglang.srt.layers.ops.linear.quantized import QuantizedWeight

SUM_BLOCK = 1024
_SCRATCH = Scratch(partial_bytes=0, counters=1 << 14)
_NO_CLAMP = SwiGLUClamp()


class _Rows(NamedTuple):
    """The blocks of rows of one call; see `sort_by_expert`."""

    rows: Tensor
    block_experts: Tensor
    weights: Tensor
    direct: bool


def moe_experts(
    x: Tensor, weights: Tensor, ids: Tensor, experts: ExpertWeights
) -> Tensor:
    """`ops.moe.moe_experts`.

    Products are weighted, then rounded to the dtype of `x`, before they are summed.

    Raises:
        ValueError: packed weights, a tensor that is not contiguous, or one of another
            dtype.
    """
    _check(x, weights, ids, experts)
    tokens, hidden = x.shape
    out = x.new_empty(tokens, hidden)
    assignments = ids.numel()
    if assignments == 0:
        return out.zero_()
    top_k, num_experts = ids.shape[1], experts.down.shape[0]
    if tokens == 1:
        listed = _Rows(ids, ids.view(-1), weights, direct=True)
    else:
        block_m = block_rows(assignments=assignments, experts=num_experts)
        sorted_rows = sort_by_expert(ids, experts=num_experts, block_m=block_m)
        listed = _Rows(*sorted_rows, weights, direct=False)
    inner = x.new_empty(assignments, experts.inner)
    products = x.new_empty(assignments, hidden)
    _product(x, experts, listed, inner, top_k=top_k, gated=True)
    is_summed = tokens == 1
    _product(
        inner,
        experts,
        listed,
        products,
        top_k=1,
        gated=False,
        sums=out if is_summed else None,
    )
    if is_summed:
        return out
    block = min(SUM_BLOCK, triton.next_power_of_2(hidden))
    sum_kernel[(tokens, triton.cdiv(hidden, block))](
        products,
        out,
        WIDTH=hidden,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
        **launch_options(x.device),
    )
    return out


def _product(
    x: Tensor,
    experts: ExpertWeights,
    listed: _Rows,
    out: Tensor,
    *,
    top_k: int,
    gated: bool,
    sums: Tensor | None = None,
) -> None:
    """Compute out [assignments, outputs] from x [assignments / top_k, inputs]: the
    activation of gate and up, or the weighted product with down.

    Args:
        sums: [1, outputs], receives the sum of a single token's products; None for no
            sum.
    """
    weight = experts.gate_up if gated else experts.down
    bias = experts.gate_up_bias if gated else experts.down_bias
    assignments, outputs = out.shape
    stored = stored_weight(weight)
    config = lookup(
        assignments=assignments,
        experts=weight.shape[0],
        outputs=outputs,
        gated=gated,
        itemsize=x.element_size(),
    )
    product = GroupedProduct(
        k=x.shape[1],
        outputs=outputs,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=_step(weight),
        experts=weight.shape[0],
        top_k=top_k,
        gated=gated,
        clamped=experts.clamp is not None,
        has_bias=bias is not None,
        direct=listed.direct,
        addends=0 if sums is None else assignments,
        **stored.constants,
    )
    clamp = experts.clamp or _NO_CLAMP
    tiles = triton.cdiv(outputs, config.block_n)
    counters = None
    if sums is not None:
        _, counters = _SCRATCH.get(x.device, partial_bytes=0, counters=tiles)
    grouped_kernel[(tiles, listed.block_experts.numel())](
        x,
        stored.codes,
        stored.scales,
        stored.zeros,
        x if bias is None else bias,
        listed.rows,
        listed.block_experts,
        listed.weights,
        out,
        sums,
        counters,
        assignments,
        clamp.alpha,
        clamp.limit,
        PRODUCT=product,
        STAGES=config.stages,
        num_warps=config.warps,
        **launch_options(x.device),
    )


def _check(x: Tensor, weights: Tensor, ids: Tensor, experts: ExpertWeights) -> None:
    if experts.is_packed:
        raise ValueError(
            "moe_experts: weights are packed for the CPU, tensors on a GPU"
        )
    hidden = experts.down.shape[1]
    if x.dim() != 2 or x.shape[1] != hidden or ids.shape != weights.shape:
        raise ValueError(
            f"moe_experts: x is {tuple(x.shape)}, ids {tuple(ids.shape)}, weights "
            f"{tuple(weights.shape)}; expected [T, {hidden}] and twice [T, K]"
        )
    for name, tensor in (
        ("x", x),
        ("ids", ids),
        ("weights", weights),
        ("gate_up", stored_weight(experts.gate_up).codes),
        ("down", stored_weight(experts.down).codes),
    ):
        if not tensor.is_contiguous():
            raise ValueError(f"moe_experts: {name} must be contiguous")
    for weight in (experts.gate_up, experts.down):
        if isinstance(weight, Tensor) and weight.dtype != x.dtype:
            raise ValueError(
                f"moe_experts: x is {x.dtype}, the weights are {weight.dtype}; they "
                "must be alike"
            )


def _step(weight: Tensor | QuantizedWeight) -> int:
    """Return the columns of a step of the sums, which stays inside of a group."""
    if isinstance(weight, Tensor) or weight.is_scaled_by_row:
        return BLOCK_K
    step = min(BLOCK_K, weight.group_columns & -weight.group_columns)
    least = MIN_STEP * FORMATS[weight.format].per_item
    if step < least:
        raise ValueError(
            f"moe_experts: groups of {weight.group_columns} columns share a scale; "
            f"supported: multiples of {least}"
        )
    return step
