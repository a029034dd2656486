"""gpt-oss: the Llama decoder with attention sinks, biases, and experts in every
layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.moe.experts import Experts, StackLayout
from sglang.srt.layers.moe.feed_forward import MoeFeedForward
from sglang.srt.layers.moe.router import Router
from sglang.srt.layers.ops.moe.op import SwiGLUClamp
from sglang.srt.layers.ops.moe_routing.op import RoutingRule
from sglang.srt.models.llama import DecoderTraits, LlamaForCausalLM
from sglang.srt.models.moe import require_experts

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


def gpt_oss_feed_forward(config: ModelConfig, layer_id: int) -> MoeFeedForward:
    """Build a softmax over the chosen experts, whose gates are clamped."""
    moe, hidden = require_experts(config), config.hidden_size
    rule = RoutingRule(top_k=moe.top_k, renormalise=True)
    values = config.values
    return MoeFeedForward(
        hidden,
        gate=Router(hidden, moe.num_experts, rule, bias=True),
        experts=Experts(
            num_experts=moe.num_experts,
            hidden_size=hidden,
            intermediate_size=moe.intermediate_size,
            bias=True,
            clamp=SwiGLUClamp(
                alpha=values.get("swiglu_alpha"), limit=values.get("swiglu_limit")
            ),
            layout=StackLayout(is_transposed=True, is_interleaved=True),
            what="intermediate_size",
        ),
        top_k=moe.top_k,
    )


class GptOssForCausalLM(LlamaForCausalLM):
    traits = DecoderTraits(sinks=True, feed_forward=gpt_oss_feed_forward)
    has_experts = True
    packed_modules = LlamaForCausalLM.packed_modules | {"router": ("gate", None)}
