"""Feed-forward blocks of decoders with experts, as their config.json describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.feed_forward import MoeFeedForward, SharedExpert
from sglang.srt.layers.moe.router import Router
from sglang.srt.layers.ops.moe_routing import RoutingRule
from sglang.srt.models.llama import DecoderMLP, check_activation

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.moe_config import MoeConfig


def require_experts(config: ModelConfig) -> MoeConfig:
    """The experts of a model that cannot be without.

    Raises:
        ValueError: config.json has none, or another activation than silu; names the
            file and the keys.
    """
    if config.moe is None:
        raise ValueError(
            f"{config.file}: {config.architecture} needs num_experts "
            "(or num_local_experts, n_routed_experts) of at least 1"
        )
    check_activation(config, ("silu",))
    return config.moe


def qwen_feed_forward(
    config: ModelConfig, layer_id: int
) -> DecoderMLP | MoeFeedForward:
    """Softmax over all experts; the shared expert, if any, has a gate of its own."""
    moe = require_experts(config)
    if layer_id not in moe.layers:
        return DecoderMLP(config)
    hidden, shared = config.hidden_size, moe.shared_intermediate_size
    rule = RoutingRule(top_k=moe.top_k, renormalise=moe.norm_topk_prob)
    return MoeFeedForward(
        hidden,
        gate=Router(hidden, moe.num_experts, rule),
        experts=Experts(
            num_experts=moe.num_experts,
            hidden_size=hidden,
            intermediate_size=moe.intermediate_size,
        ),
        top_k=moe.top_k,
        shared_expert=(
            SharedExpert(hidden, shared, what="shared_expert_intermediate_size")
            if shared
            else None
        ),
        gates_shared=shared > 0,
    )
