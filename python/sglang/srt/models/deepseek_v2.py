"""DeepSeek V2 and V3: latent attention, dense first layers, experts in groups.

They only differ in how tokens are routed, and config.json describes that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sglang.srt.distributed.parallel_state import Addend, get_tp_group
from sglang.srt.distributed.partition import Part, divide
from sglang.srt.layers.latent_attention import (
    ExpandedAttention,
    LatentAttention,
    LatentProjection,
    half_split_order,
)
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.moe_routing.op import RoutingRule
from sglang.srt.layers.quantization import parts_by_row
from sglang.srt.models.llama import DecoderMLP, DecoderTraits, LlamaForCausalLM
from sglang.srt.models.moe import moe_feed_forward, require_experts
from sglang.srt.utils.json_file import shown

if TYPE_CHECKING:
    from sglang.srt.configs.latent_config import LatentConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.moe_config import MoeConfig
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.moe.feed_forward import MoeFeedForward

# Epsilon of the norms of compressed queries and latents, whatever rms_norm_eps is.
LATENT_EPS = 1e-6


def require_latent(config: ModelConfig) -> LatentConfig:
    """Return the latents of a model that requires them.

    Raises:
        ValueError: config.json has none. The message names the file and the key.
    """
    if config.latent is None:
        raise ValueError(f"{config.file}: {config.architecture} needs kv_lora_rank")
    return config.latent


class DeepseekAttention(Module):
    """Multi-head latent attention, in the form that the backend of the forward chooses.

    Both compressions are one product, which every rank computes whole; the heads are
    split over the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        traits: DecoderTraits,
        *,
        layer_id: int,
        cos_sin_cache: Tensor,
        input_size: int,
    ) -> None:
        super().__init__()
        latent = self._latent = require_latent(config)
        heads = divide(config.num_heads, get_tp_group(), what="num_attention_heads")
        queries: dict[str | None, Part] = {None: heads.scaled(latent.query_dim)}
        compressed: dict[str | None, Part] = {"kv": Part.whole(latent.width)}
        if latent.query_rank is None:
            self.q_proj = ColumnParallelLinear(input_size, queries, bias=False)
        else:
            compressed = {"q": Part.whole(latent.query_rank), **compressed}
            self.q_a_layernorm = RMSNorm(latent.query_rank, LATENT_EPS)
            self.q_b_proj = ColumnParallelLinear(latent.query_rank, queries, bias=False)
        bias = config.attention_bias
        self.qkv_a_proj = ColumnParallelLinear(input_size, compressed, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, LATENT_EPS)
        self.kv_b_proj = LatentProjection(latent, heads)
        self.o_proj = RowParallelLinear(
            config.num_heads * latent.value_dim,
            config.hidden_size,
            bias=bias,
            what="num_attention_heads * v_head_dim",
        )
        common: dict[str, Any] = {
            "latent": latent,
            "num_heads": heads.size,
            "layer_id": layer_id,
            "scaling": config.attention_scale,
            "cos_sin_cache": cos_sin_cache,
            "norm": self.kv_a_layernorm,
        }
        self.attn = LatentAttention(**common)
        self.expanded = ExpandedAttention(projection=self.kv_b_proj, **common)

    def forward(
        self, x: Tensor, residual: Tensor, forward_batch: ForwardBatch
    ) -> Addend | None:
        """As `RowParallelLinear.forward_into`."""
        queries, key = self._project(x)
        if self.expanded.is_chosen(forward_batch):
            k = key.unsqueeze(1)
            v = k[..., : self._latent.rank]
            heads = self.expanded.attend(queries, k, v, forward_batch)
        else:
            heads = self._attend_absorbed(queries, key, forward_batch)
        return self.o_proj.forward_into(heads, residual)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (queries [T, Hq, query_dim], key [T, latent.width]), neither
        rotated."""
        latent = self._latent
        compressed = self.qkv_a_proj(x)
        if latent.query_rank is None:
            queries, key = self.q_proj(x), compressed
        else:
            sizes = [latent.query_rank, latent.width]
            query, key = compressed.split_with_sizes(sizes, dim=1)
            queries = self.q_b_proj(self.q_a_layernorm(query))
        return queries.view(x.shape[0], self.attn.num_heads, latent.query_dim), key

    def _attend_absorbed(
        self, queries: Tensor, key: Tensor, forward_batch: ForwardBatch
    ) -> Tensor:
        """Return the results of the heads, [T, Hq * value_dim]."""
        latent, tokens = self._latent, queries.shape[0]
        qkv = self.attn.qkv_buffer(tokens)
        if qkv is None:
            q = queries.new_empty(tokens, self.attn.num_heads, latent.width)
            k = key.unsqueeze(1)
        else:
            q, k, _ = self.attn.split(qkv)
            k[:, 0].copy_(key)
        sizes = [latent.nope_dim, latent.rope_dim]
        nope, rope = queries.split_with_sizes(sizes, dim=2)
        self.kv_b_proj.absorb(nope, out=q[..., : latent.rank])
        q[..., latent.rank :].copy_(rope)
        if qkv is None:
            attended = self.attn.attend(q, k, k[..., : latent.rank], forward_batch)
        else:
            attended = self.attn(qkv, forward_batch)
        heads = self.kv_b_proj.values(attended.view(tokens, -1, latent.rank))
        return heads.view(tokens, -1)

    def split_rotated_halves(self) -> None:
        """Reorder the rotated channels, which the checkpoint has in interleaved pairs,
        into the order that the rotation takes."""
        latent = self._latent
        order = half_split_order(latent.rope_dim)
        projection = self.q_proj if latent.query_rank is None else self.q_b_proj
        for rows in (_rows(projection, latent.query_dim), _rows(self.qkv_a_proj, None)):
            for tensor in rows:
                rotated = tensor[:, -latent.rope_dim :]
                rotated.copy_(rotated[:, order.to(tensor.device)])


def split_rotated_halves(model: nn.Module) -> None:
    """Reorder the rotated channels of all attention in a model whose checkpoint has
    them in interleaved pairs."""
    for module in model.modules():
        if isinstance(module, DeepseekAttention):
            module.split_rotated_halves()


def _rows(linear: Linear, size: int | None) -> list[Tensor]:
    """View weight, its scales, zeros and bias as [blocks of `size` rows, size, ...];
    None means one block."""
    found = parts_by_row(linear, "weight") + parts_by_row(linear, "bias")
    return [tensor.unflatten(0, (-1, size or tensor.shape[0])) for tensor in found]


def deepseek_feed_forward(
    config: ModelConfig, layer_id: int, *, is_sigmoid: bool
) -> DecoderMLP | MoeFeedForward:
    """Build shared experts without a gate, and experts from the best groups.

    Args:
        is_sigmoid: scores are sigmoids with a correction for the choice (V3); otherwise
            a softmax (V2).
    """
    moe = require_experts(config)
    if layer_id not in moe.layers:
        return DecoderMLP(config)
    return moe_feed_forward(
        config,
        moe,
        rule=_sigmoid_rule(config, moe) if is_sigmoid else _softmax_rule(config, moe),
        has_correction=is_sigmoid,
        shared_what="n_shared_experts * moe_intermediate_size",
        gates_shared=False,
    )


def _softmax_rule(config: ModelConfig, moe: MoeConfig) -> RoutingRule:
    limited = _checked_method(config, ("greedy", "group_limited_greedy"))
    if moe.norm_topk_prob:
        raise config.values.error("norm_topk_prob", "true is not supported for V2")
    groups = moe.num_groups if limited == "group_limited_greedy" else 1
    return RoutingRule(
        top_k=moe.top_k,
        scale=moe.scale,
        groups=groups,
        top_groups=moe.top_groups if groups > 1 else 1,
    )


def _sigmoid_rule(config: ModelConfig, moe: MoeConfig) -> RoutingRule:
    _checked_method(config, ("noaux_tc",))
    return RoutingRule(
        top_k=moe.top_k,
        is_sigmoid=True,
        renormalise=moe.norm_topk_prob,
        scale=moe.scale,
        groups=moe.num_groups,
        top_groups=moe.top_groups,
        group_best=2,
    )


def _checked_method(config: ModelConfig, admitted: tuple[str, ...]) -> str:
    method = config.values.get("topk_method", default=admitted[0])
    if method not in admitted:
        raise config.values.error(
            "topk_method",
            f"is {shown(method)}, which {config.architecture} does not know; "
            f"supported: {', '.join(admitted)}",
        )
    return str(method)


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """DeepSeek V2 (2024)."""

    traits = DecoderTraits(
        attention=DeepseekAttention,
        feed_forward=partial(deepseek_feed_forward, is_sigmoid=False),
    )
    has_experts = True
    keeps_latents = True
    packed_modules = {
        "q_a_proj": ("qkv_a_proj", "q"),
        "kv_a_proj_with_mqa": ("qkv_a_proj", "kv"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
        "shared_experts": ("shared_expert", None),
    }
    has_interleaved_pairs = True

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config, **options)
        count = config.values.get("num_nextn_predict_layers")
        layers = range(config.num_layers, config.num_layers + count)
        self._unused = tuple(f"model.layers.{layer}." for layer in layers)

    def own_name(self, name: str) -> str | None:
        """Layers that predict further tokens belong to a draft (`models/nextn.py`)."""
        if name.startswith(self._unused):
            return None
        return super().own_name(name)

    def finish_loading(self, source: str) -> None:
        if self.has_interleaved_pairs:
            split_rotated_halves(self)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek V3 (2024)."""

    traits = DecoderTraits(
        attention=DeepseekAttention,
        feed_forward=partial(deepseek_feed_forward, is_sigmoid=True),
    )

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.has_interleaved_pairs = config.values.get("rope_interleave")
