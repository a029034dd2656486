"""The ops of recurrent state compute the layers of `transformers`: the gated delta net
of Qwen3-Next and the short convolution of LFM2, whole and in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers")

from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from sglang.srt.layers.ops.state.gated_delta.inputs import DeltaInputs
from sglang.srt.layers.ops.state.gated_delta.op import (
    gated_delta_decode,
    gated_delta_prefill,
)
from sglang.srt.layers.ops.state.short_conv.conv_filter import ConvFilter
from sglang.srt.layers.ops.state.short_conv.op import (
    short_conv_decode,
    short_conv_prefill,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="cpu")

SLOT = torch.tensor([2])
# Lengths of the pieces of a sequence; a piece of one token is decoded.
PIECES = [[150], [64, 64, 22], [1, 70, 1, 1, 63, 14], [100, *[1] * 50]]


def convolve(x: Tensor, conv: ConvFilter, state: Tensor, *, is_first: bool) -> Tensor:
    if len(x) == 1 and not is_first:
        return short_conv_decode(x, conv, state, slots=SLOT)
    return short_conv_prefill(
        x,
        conv,
        state,
        slots=SLOT,
        qo_indptr=torch.tensor([0, len(x)]),
        has_state=torch.tensor([not is_first]),
    )


def apply_delta(inputs: DeltaInputs, state: Tensor, *, is_first: bool) -> Tensor:
    tokens = len(inputs.v)
    if tokens == 1 and not is_first:
        return gated_delta_decode(inputs, state, slots=SLOT)
    return gated_delta_prefill(
        inputs,
        state,
        slots=SLOT,
        qo_indptr=torch.tensor([0, tokens]),
        has_state=torch.tensor([not is_first]),
    )


class DeltaNet:
    """The layer of `transformers` with our ops between its projections."""

    def __init__(self, layer: qwen3_next.Qwen3NextGatedDeltaNet) -> None:
        self.layer = layer
        weight = layer.conv1d.weight.squeeze(1)
        self.conv = ConvFilter(weight=weight, bias=layer.conv1d.bias, silu=True)
        # Not zeros, which the first piece must not read.
        self.conv_state = torch.randn(4, weight.shape[0], weight.shape[1] - 1)
        self.state = torch.randn(
            4, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        )

    def __call__(self, hidden: Tensor, *, is_first: bool) -> Tensor:
        layer = self.layer
        q, k, v, z, b, a = (
            part[0]
            for part in layer.fix_query_key_value_ordering(
                layer.in_proj_qkvz(hidden[None]), layer.in_proj_ba(hidden[None])
            )
        )
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
        mixed = convolve(mixed, self.conv, self.conv_state, is_first=is_first)
        q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=1)
        keys = (layer.num_k_heads, layer.head_k_dim)
        decay = functional.softplus(a.float() + layer.dt_bias)
        inputs = DeltaInputs(
            q=q.unflatten(1, keys),
            k=k.unflatten(1, keys),
            v=v.unflatten(1, (layer.num_v_heads, layer.head_v_dim)),
            g=-layer.A_log.float().exp() * decay,
            beta=b.sigmoid(),
            scale=layer.head_k_dim**-0.5,
            normalise=True,
        )
        out = apply_delta(inputs, self.state, is_first=is_first)
        normed = layer.norm(out.flatten(0, 1), z.flatten(0, 1))
        projected: Tensor = layer.out_proj(normed.view(len(hidden), -1))
        return projected


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@torch.no_grad()
def test_gated_delta_net_of_qwen3_next(pieces: list[int]) -> None:
    torch.manual_seed(0)
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=24,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    layer = qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    layer.dt_bias.copy_(torch.randn(4))
    layer.A_log.copy_(torch.randn(4))
    hidden = torch.randn(sum(pieces), 48)
    expected = layer(hidden[None])[0]
    ours = DeltaNet(layer)
    parts = hidden.split(pieces)
    out = [ours(part, is_first=i == 0) for i, part in enumerate(parts)]
    torch.testing.assert_close(torch.cat(out), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@torch.no_grad()
def test_short_convolution_of_lfm2(pieces: list[int], width: int, bias: bool) -> None:
    torch.manual_seed(0)
    config = lfm2.Lfm2Config(
        hidden_size=40,
        conv_L_cache=width,
        conv_bias=bias,
        num_hidden_layers=1,
        layer_types=["conv"],
    )
    layer = lfm2.Lfm2ShortConv(config, 0)
    hidden = torch.randn(sum(pieces), 40)
    expected = layer(hidden[None])[0]
    conv = ConvFilter(
        weight=layer.conv.weight.squeeze(1), bias=layer.conv.bias, silu=False
    )
    state = torch.randn(4, 40, width - 1)
    before, after, x = layer.in_proj(hidden).chunk(3, dim=1)
    parts = (before * x).split(pieces)
    out = [convolve(p, conv, state, is_first=i == 0) for i, p in enumerate(parts)]
    ours = layer.out_proj(after * torch.cat(out))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
