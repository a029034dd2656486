"""Qwen3-Next: a gated delta rule in most layers, gated attention in the others, and
experts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.configs.layer_types import LINEAR
from sglang.srt.configs.state_config import DeltaShape
from sglang.srt.distributed.parallel_state import Addend, get_tp_group
from sglang.srt.distributed.partition import Part, divide, divide_kv_heads
from sglang.srt.layers.joined_linear import Joined, JoinedLinear
from sglang.srt.layers.layernorm import GatedRMSNorm
from sglang.srt.layers.linear import LoadableParameter, RowParallelLinear
from sglang.srt.layers.module import Module
from sglang.srt.layers.state.gated_delta import GatedDelta
from sglang.srt.layers.state.short_conv import DepthwiseConv
from sglang.srt.models.llama import (
    DecoderAttention,
    DecoderTraits,
    LlamaForCausalLM,
    StateMixer,
    check_activation,
)
from sglang.srt.models.moe import qwen_feed_forward

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.batch import ForwardBatch


class GatedQKVLinear(JoinedLinear):
    """`QKVLinear` with a gate per channel of the heads' results: rows are `[q | k | v |
    gate]`. Checkpoints have q and gate of each head in turn."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
    ) -> None:
        group = get_tp_group()
        heads = divide(num_heads, group, what="num_attention_heads")
        kv_heads = divide_kv_heads(num_kv_heads, group)
        q, kv = heads.scaled(head_dim), kv_heads.scaled(head_dim)
        super().__init__(
            hidden_size,
            {"q": q, "k": kv, "v": kv, "gate": q},
            {"q_gate": Joined(shards=("q", "gate"), groups=num_heads)},
            bias=bias,
        )
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size


class GatedAttention(DecoderAttention):
    """Attention whose results are multiplied by the sigmoid of a gate."""

    projection = GatedQKVLinear

    def forward(
        self, x: Tensor, residual: Tensor | None, forward_batch: ForwardBatch
    ) -> Addend | None:
        """As `RowParallelLinear.forward_into`."""
        projected = self.qkv_proj(x)
        qkv = projected[:, : self.attn.qkv_width]
        gate = projected[:, self.attn.qkv_width :]
        heads = self.attn(qkv, forward_batch) * gate.sigmoid()
        return self.o_proj.forward_into(heads, residual)


class GatedDeltaNet(Module):
    """The gated delta rule between two projections, with a gated norm behind it.

    All inputs of a layer are one product: rows are `[q | k | v | b | a | z]`, z the
    gate of the norm. Checkpoints have several tensors for them, in one of two layouts:
    joined by key head (Qwen3-Next), or not (Qwen3.5).
    """

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        state, hidden, group = config.state, config.hidden_size, get_tp_group()
        assert state is not None and state.delta is not None
        full = state.delta
        key_heads = divide(full.key_heads, group, what="linear_num_key_heads")
        heads = divide(full.heads, group, what="linear_num_value_heads")
        keys, values = key_heads.scaled(full.d_k), heads.scaled(full.d_v)
        qkv: dict[str | None, Part] = {"q": keys, "k": keys, "v": values}
        by_key_head = full.key_heads
        self.in_proj = JoinedLinear(
            hidden,
            {**qkv, "b": heads, "a": heads, "z": values},
            {
                "qkvz": Joined(shards=("q", "k", "v", "z"), groups=by_key_head),
                "ba": Joined(shards=("b", "a"), groups=by_key_head),
                "qkv": Joined(shards=("q", "k", "v")),
            },
            bias=False,
        )
        self.conv1d = DepthwiseConv(qkv, width=state.conv_width, bias=False, silu=True)
        self.A_log, self.dt_bias = _head_vector(heads), _head_vector(heads)
        self.norm = GatedRMSNorm(full.d_v, config.rms_norm_eps)
        self.out_proj = RowParallelLinear(
            full.heads * full.d_v,
            hidden,
            bias=False,
            what="linear_num_value_heads * linear_value_head_dim",
        )
        self.fold = GatedDelta(
            layer_id=layer_id,
            shape=DeltaShape(
                heads=heads.size,
                key_heads=key_heads.size,
                d_k=full.d_k,
                d_v=full.d_v,
            ),
            conv=self.conv1d,
            a_log=self.A_log,
            dt_bias=self.dt_bias,
        )
        self._by_head = (heads.size, full.d_v)

    def forward(
        self, x: Tensor, residual: Tensor | None, forward_batch: ForwardBatch
    ) -> Addend | None:
        """As `RowParallelLinear.forward_into`."""
        projected = self.in_proj(x)
        packed, z = projected[:, : self.fold.width], projected[:, self.fold.width :]
        folded = self.fold(packed, forward_batch).unflatten(1, self._by_head)
        normed = self.norm.forward_gated(folded, z.unflatten(1, self._by_head))
        return self.out_proj.forward_into(normed.flatten(1), residual)


def _head_vector(heads: Part) -> LoadableParameter:
    """Create a parameter with a number per head, in float32, since decays are."""
    data = torch.empty(heads.size, dtype=torch.float32)
    return LoadableParameter.create(data, {None: heads})


class QwenHybrid(LlamaForCausalLM):
    """What Qwen3-Next and Qwen3.5 share.

    Tensors for multi-token prediction (`mtp.*`) belong to a draft (`models/nextn.py`).
    """

    state_type = LINEAR
    traits = DecoderTraits(
        qk_norm=True,
        norm_offset=1.0,
        attention=GatedAttention,
        state_mixer=StateMixer("linear_attn", GatedDeltaNet),
    )

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        # The convolution has it as well, and knows no other.
        check_activation(config, ("silu",))
        super().__init__(config, rope_rows=rope_rows)

    def own_name(self, name: str) -> str | None:
        return None if name.startswith("mtp.") else super().own_name(name)


ATTENTION_PARTS: dict[str, tuple[str, str | None]] = {
    **LlamaForCausalLM.packed_modules,
    "q_proj": ("qkv_proj", "q_gate"),
}


class Qwen3NextForCausalLM(QwenHybrid):
    traits = dataclasses.replace(QwenHybrid.traits, feed_forward=qwen_feed_forward)
    has_experts = True
    packed_modules = ATTENTION_PARTS | {
        "in_proj_qkvz": ("in_proj", "qkvz"),
        "in_proj_ba": ("in_proj", "ba"),
    }
