"""Feed-forward blocks with experts, as config.json describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.feed_forward import MoeFeedForward, SharedExpert
from sglang.srt.layers.moe.router import Router
from sglang.srt.layers.ops.moe_routing.op import RoutingRule
from sglang.srt.models.llama import DecoderMLP, check_activation

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.moe_config import MoeConfig


def require_experts(config: ModelConfig) -> MoeConfig:
    """Return the experts of a model that requires them.

    Raises:
        ValueError: config.json has none, or an activation other than silu. The message
            names the file and the keys.
    """
    if config.moe is None:
        raise ValueError(
            f"{config.file}: {config.architecture} needs num_experts "
            "(or num_local_experts, n_routed_experts) of at least 1"
        )
    check_activation(config, ("silu",))
    return config.moe


def moe_feed_forward(
    config: ModelConfig,
    moe: MoeConfig,
    *,
    rule: RoutingRule,
    has_correction: bool = False,
    shared_what: str,
    gates_shared: bool,
) -> MoeFeedForward:
    """Build a layer's experts and the shared expert, if there is one.

    Args:
        has_correction: as in `Router`.
        shared_what: the fields of config.json that give the shared expert's size.
        gates_shared: the shared expert has its own gate.
    """
    hidden, shared = config.hidden_size, moe.shared_intermediate_size
    return MoeFeedForward(
        hidden,
        gate=Router(hidden, moe.num_experts, rule, has_correction=has_correction),
        experts=Experts(
            num_experts=moe.num_experts,
            hidden_size=hidden,
            intermediate_size=moe.intermediate_size,
        ),
        top_k=moe.top_k,
        shared_expert=(
            SharedExpert(hidden, shared, what=shared_what) if shared else None
        ),
        gates_shared=gates_shared and shared > 0,
    )


def qwen_feed_forward(
    config: ModelConfig, layer_id: int
) -> DecoderMLP | MoeFeedForward:
    """Build a softmax over all experts; the shared expert, if any, has its own gate."""
    moe = require_experts(config)
    if layer_id not in moe.layers:
        return DecoderMLP(config)
    return moe_feed_forward(
        config,
        moe,
        rule=RoutingRule(top_k=moe.top_k, renormalise=moe.norm_topk_prob),
        shared_what="shared_expert_intermediate_size",
        gates_shared=True,
    )
