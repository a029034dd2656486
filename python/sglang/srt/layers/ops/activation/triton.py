"""Triton kernel of the gated activations; `op.py` describes them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.utils.triton_launch import (
    let_next_start,
    supports_dependent_launch,
    wait_for_inputs,
)

BLOCK = 1024
IS_GELU = {"silu": False, "gelu_pytorch_tanh": True}
"""By the name of the activation, as `ops.activation.GATED`."""


@triton.jit
def activated(gate, up, GELU: tl.constexpr):
    """silu(gate) * up, or gelu(gate) * up; float32."""
    slope = gate
    if GELU:
        # (1 + tanh(u)) / 2 = sigmoid(2 u); the factor is 2 sqrt(2 / pi).
        slope = gate * (1.0 + 0.044715 * gate * gate) * 1.5957691216057308
    return gate / (1.0 + tl.exp(-slope)) * up


@triton.jit
def gated_kernel(
    x,
    out,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < WIDTH
    let_next_start(PDL)
    wait_for_inputs(PDL)
    start = x + row * x_stride + channel
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = activated(gate, up, GELU)
    tl.store(out + row * WIDTH + channel, result.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`ops.activation.silu_and_mul`. x: [T, 2 * I], the last dimension contiguous."""
    return _gated("silu_and_mul", x, out, is_gelu=False)


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`ops.activation.gelu_and_mul`; x as for `silu_and_mul`."""
    return _gated("gelu_and_mul", x, out, is_gelu=True)


def _gated(name: str, x: Tensor, out: Tensor | None, *, is_gelu: bool) -> Tensor:
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{name}: x is {tuple(x.shape)}, expected [T, 2 * I]")
    rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = x.new_empty(rows, width)
    if rows == 0 or width == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(width))
    pdl = supports_dependent_launch(x.device)
    gated_kernel[(rows, triton.cdiv(width, block))](
        x,
        out,
        x.stride(0),
        WIDTH=width,
        BLOCK=block,
        GELU=is_gelu,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
