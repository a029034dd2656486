"""Triton kernel that multiplies one token's heads by their matrices. `op.py` describes
the function.

The weights do not depend on the preceding kernel, so they are loaded before it ends.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.layers.ops.head_linear.op import PackedHeads, head_linear_ref
from sglang.srt.utils.triton_launch import (
    block_of,
    launch_options,
    let_next_start,
    wait_for_inputs,
)

BLOCK_K = 512
"""Most inputs that a program multiplies at once."""
TILE = 8192
"""Weights that a program loads at once."""


@triton.jit
def head_gemv_kernel(
    x,
    weight,
    out,
    x_head,
    out_head,
    weight_head,
    N_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [heads, N] = x [heads, K] times weight [heads, N, K], with the given strides.

    Grid: (tiles of outputs, heads).
    """
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    let_next_start(PDL)
    start = weight + head * weight_head + n[:, None] * N_STRIDE
    is_output = n < N
    mask = is_output[:, None] & (k < K)[None, :]
    ahead = tl.load(start + k[None, :] * K_STRIDE, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        current = ahead
        here = first + k
        later = here + BLOCK_K
        mask = is_output[:, None] & (later < K)[None, :]
        ahead = tl.load(start + later[None, :] * K_STRIDE, mask=mask, other=0.0)
        value = tl.load(x + head * x_head + here, mask=here < K, other=0.0)
        total += current.to(tl.float32) * value.to(tl.float32)[None, :]
    result = tl.sum(total, axis=1).to(out.dtype.element_ty)
    tl.store(out + head * out_head + n, result, mask=is_output)


def head_linear(
    x: Tensor, weight: Tensor | PackedHeads, *, out: Tensor | None = None
) -> Tensor:
    """`ops.head_linear.head_linear`: one token runs here, more run in cuBLAS."""
    if x.shape[0] != 1 or isinstance(weight, PackedHeads):
        return head_linear_ref(x, weight, out=out)
    heads, outputs, inputs = weight.shape
    if out is None:
        out = x.new_empty(1, heads, outputs)
    if x.shape != (1, heads, inputs) or out.shape != (1, heads, outputs):
        raise ValueError(
            f"head_linear: x is {tuple(x.shape)}, out {tuple(out.shape)}; weights "
            f"{tuple(weight.shape)} need matching heads and channels"
        )
    if x.stride(2) != 1 or out.stride(2) != 1 or weight.dtype != x.dtype:
        raise ValueError(
            f"head_linear: x has strides {x.stride()}, out {out.stride()}; channels "
            f"must be contiguous. x is {x.dtype}, the weights {weight.dtype}"
        )
    block_k = min(block_of(inputs), BLOCK_K)
    block_n = min(block_of(outputs), max(TILE // block_k, 1))
    head_gemv_kernel[(triton.cdiv(outputs, block_n), heads)](
        x,
        weight,
        out,
        x.stride(1),
        out.stride(1),
        weight.stride(0),
        N_STRIDE=weight.stride(1),
        K_STRIDE=weight.stride(2),
        N=outputs,
        K=inputs,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        **launch_options(x.device),
    )
    return out
