"""Gated feed-forward blocks of the chosen experts, and their packed weights.

Owns the formats of the weights. Knows nothing of routing, layers or sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kv_canary.op import native_available
from sglang.srt.layers.ops.linear.op import (
    PackedWeight,
    pack_panels,
    unpack_weight,
)
from sglang.srt.layers.ops.linear.quantized import PANEL, QuantizedWeight, dequantize
from sglang.srt.utils.dispatch import Op

HALF = PANEL // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiGLUClamp:
    """gate * sigmoid(alpha * gate) * (up + 1) with gate <= limit and |up| <= limit
    (gpt-oss), instead of silu(gate) * up."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The weights of E experts with H inputs and I inner channels.

    Fields:
        gate_up: [E, 2 * I, H], the rows of the gate first; may be quantised. Packed:
            [E, ceil(I / 16), H, 32], where a panel has 16 rows of the gate and the same
            16 rows of up, in the format of `PackedWeight`.
        down: [E, H, I]; may be quantised. Packed [E, ceil(H / 32), I, 32].
        gate_up_bias, down_bias: [E, 2 * I] and [E, H], or None. Packed: in panel order,
            float32.
        inner: I.
        clamp: clamp of the activation, or None for plain SwiGLU.
        is_packed: in the format of the native CPU kernels.
    """

    gate_up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    inner: int
    clamp: SwiGLUClamp | None = None
    is_packed: bool = False

    @property
    def count(self) -> int:
        """E."""
        return self.down.shape[0]


def pack_experts(weights: ExpertWeights) -> ExpertWeights:
    """Pack for the native CPU kernels, or return `weights` unchanged if they are not
    used.

    Weights are stored in bfloat16 if every one is exactly a bfloat16, otherwise in
    float32.
    """
    whole, down = weights.gate_up, weights.down
    if isinstance(whole, QuantizedWeight) or isinstance(down, QuantizedWeight):
        return weights
    if not (whole.is_cpu and native_available()):
        return weights
    matrices = (whole, down)
    packed = _pack_all(*matrices, torch.bfloat16) or _pack_all(*matrices, torch.float32)
    assert packed is not None
    bias, down_bias = weights.gate_up_bias, weights.down_bias
    if bias is not None:
        bias = _interleave(bias.float()[..., None], weights.inner)[..., 0].contiguous()
    return ExpertWeights(
        gate_up=packed[0],
        down=packed[1],
        gate_up_bias=bias,
        down_bias=None if down_bias is None else down_bias.float().contiguous(),
        inner=weights.inner,
        clamp=weights.clamp,
        is_packed=True,
    )


def _pack_all(
    gate_up: Tensor, down: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Pack gate_up and down as panels of `dtype`, expert by expert to save memory.
    Return None unless every weight is exactly of that dtype."""
    experts, hidden, inner = down.shape
    packed = (
        down.new_empty(experts, -(-inner // HALF), hidden, PANEL, dtype=dtype),
        down.new_empty(experts, -(-hidden // PANEL), inner, PANEL, dtype=dtype),
    )
    for expert in range(experts):
        matrices = (_interleave(gate_up[expert], inner), down[expert])
        for target, matrix in zip(packed, matrices, strict=True):
            panels = pack_panels(matrix, dtype)
            if panels is None:
                return None
            target[expert] = panels
    return packed


def _interleave(rows: Tensor, inner: int) -> Tensor:
    """[..., 2 * I, H], gate first -> alternating runs of 16 rows, zeros beyond I."""
    missing = -inner % HALF
    halves: Tensor = rows.unflatten(-2, (2, inner))
    halves = functional.pad(halves, (0, 0, 0, missing))
    panels: Tensor = halves.unflatten(-2, (-1, HALF)).transpose(-4, -3)
    return panels.flatten(-4, -2)


def _plain_rows(panels: Tensor, inner: int) -> Tensor:
    """Invert `_interleave`."""
    halves: Tensor = panels.unflatten(-2, (-1, 2, HALF)).transpose(-4, -3)
    return halves.flatten(-3, -2)[..., :inner, :].flatten(-3, -2)


def expert_matrices(
    weights: ExpertWeights, expert: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return one expert's gate_up [2 * I, H], down [H, I] and biases, float32."""
    gate_up, down = _one(weights.gate_up, expert), _one(weights.down, expert)
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
    down_bias = None if weights.down_bias is None else weights.down_bias[expert]
    if weights.is_packed:
        inner, hidden = weights.inner, gate_up.shape[1]
        gate_up = _plain_rows(_unpack(gate_up, gate_up.shape[0] * PANEL), inner)
        down = _unpack(down, hidden)
        if bias is not None:
            bias = _plain_rows(bias[:, None], inner)[:, 0]
    return (
        gate_up.float(),
        down.float(),
        None if bias is None else bias.float(),
        None if down_bias is None else down_bias.float(),
    )


def _one(stack: Tensor | QuantizedWeight, expert: int) -> Tensor:
    if isinstance(stack, QuantizedWeight):
        return dequantize(stack.expert(expert))
    return stack[expert]


def _unpack(panels: Tensor, n: int) -> Tensor:
    return unpack_weight(PackedWeight(n=n, k=panels.shape[1], panel=PANEL, data=panels))


def swiglu(gate_up: Tensor, clamp: SwiGLUClamp | None) -> Tensor:
    """Apply the activation: [T, 2 * I] float32, gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is None:
        return functional.silu(gate) * up
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(min=-clamp.limit, max=clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)


def moe_experts_ref(
    x: Tensor, weights: Tensor, ids: Tensor, experts: ExpertWeights
) -> Tensor:
    """out[t] = sum over k of weights[t, k] * down(swiglu(gate_up(x[t]))) of ids[t, k].

    The native and Triton forms compute a token the same, bit by bit, whatever else is
    in the batch, and read only the weights of chosen experts.

    Args:
        x: [T, H]; float32, bfloat16 or float16, contiguous.
        weights: [T, K] float32. ids: [T, K] int32, each from 0 to E - 1.

    Returns:
        [T, H] of the dtype of `x`. Products and the sum over K, in that order, are
        float32; the activation is rounded to the dtype of `x`.
    """
    tokens, hidden = x.shape
    products = x.new_zeros(tokens, ids.shape[1], hidden, dtype=torch.float32)
    for expert, token, slot in _assignments(ids):
        gate_up, down, bias, down_bias = expert_matrices(experts, expert)
        inner = swiglu(
            functional.linear(x[token].float(), gate_up, bias), experts.clamp
        )
        inner = inner.to(x.dtype).float()
        products[token, slot] = functional.linear(inner, down, down_bias)
    out = torch.zeros_like(products[:, 0])
    for k in range(ids.shape[1]):
        out += weights[:, k, None] * products[:, k]
    return out.to(x.dtype)


def _assignments(ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (expert, its tokens, their places in `ids`) for every chosen expert."""
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        yield expert, token, slot


moe_experts = Op(
    reference=moe_experts_ref,
    native="sglang.srt.layers.ops.moe.native:moe_experts",
    triton="sglang.srt.layers.ops.moe.triton:moe_experts",
)
