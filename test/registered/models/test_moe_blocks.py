"""Blocks of families with other routers, put together here: as in transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from sglang.srt.layers.linear import LoadableParameter
from sglang.srt.layers.module import Module
from sglang.srt.layers.moe.experts import Experts, StackLayout
from sglang.srt.layers.moe.feed_forward import MoeFeedForward, SharedExpert
from sglang.srt.layers.moe.router import Router
from sglang.srt.layers.ops.moe.op import SwiGLUClamp
from sglang.srt.layers.ops.moe_routing.op import RoutingRule
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="cpu")

HIDDEN, INNER, EXPERTS, TOP_K = 64, 40, 12, 3


def randomise(module: nn.Module) -> dict[str, Tensor]:
    """Give the module random weights and return them."""
    torch.manual_seed(4)
    state = {name: torch.randn_like(t) * 0.2 for name, t in module.state_dict().items()}
    module.load_state_dict(state)
    return state


def fill(block: Module, state: dict[str, Tensor]) -> None:
    """Load every tensor into the parameter of its name; none may be left over."""
    parameters = dict(block.named_parameters())
    for name, tensor in state.items():
        target, shard = name, None
        for part in ("gate", "up"):
            if f"{part}_proj.weight" in name:
                target = name.replace(f"{part}_proj", "gate_up_proj")
                shard = part
        parameter = parameters[target]
        assert isinstance(parameter, LoadableParameter)
        parameter.load(name, tensor, shard)
    for module in block.modules():
        if isinstance(module, Module):
            module.process_weights_after_loading()


def assert_equal_outputs(block: MoeFeedForward, reference: nn.Module) -> None:
    x = torch.randn(29, HIDDEN)
    with torch.inference_mode():
        found = block(x, torch.zeros_like(x))
        expected = reference(x[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(found, expected.view(29, HIDDEN), rtol=1e-4, atol=1e-4)


def block_with(
    rule: RoutingRule, *, has_correction: bool = False, shared: int
) -> MoeFeedForward:
    """A block as DeepSeek's: the shared experts have no gate."""
    return MoeFeedForward(
        HIDDEN,
        gate=Router(HIDDEN, EXPERTS, rule, has_correction=has_correction),
        experts=Experts(
            num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INNER
        ),
        top_k=TOP_K,
        shared_expert=SharedExpert(HIDDEN, shared, what="n_shared_experts"),
    )


def test_gpt_oss() -> None:
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    reference = GptOssMLP(config).eval()
    block = MoeFeedForward(
        HIDDEN,
        gate=Router(
            HIDDEN, EXPERTS, RoutingRule(top_k=TOP_K, renormalise=True), bias=True
        ),
        experts=Experts(
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            bias=True,
            clamp=SwiGLUClamp(),
            layout=StackLayout(is_transposed=True, is_interleaved=True),
            what="intermediate_size",
        ),
        top_k=TOP_K,
    )
    state = randomise(reference)
    fill(block, {name.replace("router.", "gate."): t for name, t in state.items()})
    assert_equal_outputs(block, reference)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_deepseek_v3(norm_topk_prob: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
    )
    reference = DeepseekV3MoE(config).eval()
    rule = RoutingRule(
        top_k=TOP_K,
        is_sigmoid=True,
        renormalise=norm_topk_prob,
        scale=2.5,
        groups=4,
        top_groups=2,
        group_best=2,
    )
    block = block_with(rule, has_correction=True, shared=2 * INNER)
    state = randomise(reference)
    assert "gate.e_score_correction_bias" in state
    fill(block, {n.replace("shared_experts", "shared_expert"): state[n] for n in state})
    assert_equal_outputs(block, reference)


@pytest.mark.parametrize("topk_method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(topk_method: str) -> None:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        n_group=6,
        topk_group=2,
        topk_method=topk_method,
        routed_scaling_factor=16.0,
    )
    reference = DeepseekV2Moe(config).eval()
    limited = topk_method == "group_limited_greedy"
    rule = RoutingRule(
        top_k=TOP_K,
        scale=16.0,
        groups=6 if limited else 1,
        top_groups=2 if limited else 1,
    )
    block = block_with(rule, shared=INNER)
    state = randomise(reference)
    fill(block, {n.replace("shared_experts", "shared_expert"): state[n] for n in state})
    assert_equal_outputs(block, reference)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
