"""LFM2: short convolutions with gates in most layers, attention in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.configs.layer_types import CONV
from sglang.srt.distributed.parallel_state import Addend, get_tp_group
from sglang.srt.distributed.partition import divide
from sglang.srt.layers.joined_linear import Joined, JoinedLinear
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.module import Module
from sglang.srt.layers.state.short_conv import DepthwiseConv, ShortConv
from sglang.srt.models.llama import DecoderTraits, LlamaForCausalLM, StateMixer

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.batch import ForwardBatch


class GatedShortConv(Module):
    """c * conv(b * x), where b, c and x are projections of the layer's input."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        state, hidden = config.state, config.hidden_size
        assert state is not None
        bias = config.values.get("conv_bias")
        part = divide(hidden, get_tp_group(), what="hidden_size")
        self.in_proj = JoinedLinear(
            hidden,
            {"b": part, "c": part, "x": part},
            {None: Joined(shards=("b", "c", "x"))},
            bias=bias,
        )
        self.conv = DepthwiseConv(
            {"x": part}, width=state.conv_width, bias=bias, silu=False
        )
        self.o_proj = RowParallelLinear(hidden, hidden, bias=bias, what="hidden_size")
        self.fold = ShortConv(layer_id=layer_id, conv=self.conv)

    def forward(
        self, x: Tensor, residual: Tensor | None, forward_batch: ForwardBatch
    ) -> Addend | None:
        """As `RowParallelLinear.forward_into`."""
        before, after, inputs = self.in_proj(x).chunk(3, dim=1)
        out = self.fold.packed_buffer(x.shape[0])
        mixed = self.fold(torch.mul(before, inputs, out=out), forward_batch)
        return self.o_proj.forward_into(after * mixed, residual)


class Lfm2ForCausalLM(LlamaForCausalLM):
    """LFM2 (Liquid AI, 2025)."""

    traits = DecoderTraits(qk_norm=True, state_mixer=StateMixer("conv", GatedShortConv))
    state_type = CONV
    packed_modules = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "w1": ("gate_up_proj", "gate"),
        "w3": ("gate_up_proj", "up"),
        "w2": ("down_proj", None),
        "out_proj": ("o_proj", None),
        "q_layernorm": ("q_norm", None),
        "k_layernorm": ("k_norm", None),
        "feed_forward": ("mlp", None),
        "operator_norm": ("input_layernorm", None),
        "ffn_norm": ("post_attention_layernorm", None),
        "embedding_norm": ("norm", None),
    }
