"""Random experts and tokens, and a float64 oracle of them that loops over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.layers.ops.linear.quantized import QuantizedWeight
from sglang.srt.layers.ops.moe.op import ExpertWeights, SwiGLUClamp


def random_experts(
    experts: int,
    hidden: int,
    inner: int,
    *,
    exact: bool = True,
    bias: bool = False,
    clamp: SwiGLUClamp | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> ExpertWeights:
    """Return random weights; with `exact`, each is representable as bfloat16."""

    def draw(*shape: int, scale: float) -> Tensor:
        values = torch.randn(*shape) * scale
        if exact:
            values = values.bfloat16().float()
        return values.to(device, dtype)

    # Sums beyond the clamp's limit occur, but not usually.
    scale = 3 * hidden**-0.5
    return ExpertWeights(
        gate_up=draw(experts, 2 * inner, hidden, scale=scale),
        down=draw(experts, hidden, inner, scale=inner**-0.5),
        gate_up_bias=draw(experts, 2 * inner, scale=1.0) if bias else None,
        down_bias=draw(experts, hidden, scale=1.0) if bias else None,
        inner=inner,
        clamp=clamp,
    )


def random_choice(
    tokens: int, experts: int, top_k: int, *, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] and ids [T, K], no expert twice for a token."""
    ids = torch.rand(tokens, experts).argsort(dim=-1)[:, :top_k].int()
    return torch.rand(tokens, top_k).to(device), ids.to(device)


def oracle(x: Tensor, weights: Tensor, ids: Tensor, experts: ExpertWeights) -> Tensor:
    """`moe_experts` of plain weights in float64, one expert at a time; on the CPU."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(experts.gate_up.shape[0]):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            found = _one(x[tokens].double(), experts, expert)
            out.index_add_(0, tokens, found * weights[tokens, places, None].double())
    return out.cpu()


def _one(x: Tensor, experts: ExpertWeights, expert: int) -> Tensor:
    gate, up = _affine(x, experts.gate_up, experts.gate_up_bias, expert).chunk(2, dim=1)
    if experts.clamp is None:
        inner = gate / (1 + (-gate).exp()) * up
    else:
        alpha, limit = experts.clamp.alpha, experts.clamp.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = gate / (1 + (-alpha * gate).exp()) * (up + 1)
    return _affine(inner, experts.down, experts.down_bias, expert)


def _affine(
    x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, expert: int
) -> Tensor:
    assert isinstance(weight, Tensor)
    product = x @ weight[expert].double().T
    return product if bias is None else product + bias[expert].double()
