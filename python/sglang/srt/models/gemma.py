"""Gemma 2 and 3: norms before and after each block, scaled embeddings.

Gemma 3 may be the text part of a multimodal checkpoint; the other parts are not read.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from sglang.srt.layers.module import Module
from sglang.srt.models.llama import (
    DecoderAttention,
    DecoderTraits,
    LlamaForCausalLM,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import Addend
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.layernorm import RMSNorm


class SandwichLayer(Module):
    """Attention and MLP, each between two norms: x += norm(block(norm(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        traits: DecoderTraits,
        *,
        layer_id: int,
        cos_sin_cache: Tensor,
    ) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(
            config,
            traits,
            layer_id=layer_id,
            cos_sin_cache=cos_sin_cache,
            input_size=config.hidden_size,
        )
        self.mlp = traits.feed_forward(config, layer_id)
        self.input_layernorm = traits.norm(config.hidden_size, config)
        self.post_attention_layernorm = traits.norm(config.hidden_size, config)
        self.pre_feedforward_layernorm = traits.norm(config.hidden_size, config)
        self.post_feedforward_layernorm = traits.norm(config.hidden_size, config)

    @property
    def closing_norm(self) -> RMSNorm:
        """As `DecoderLayer.closing_norm`."""
        return self.post_feedforward_layernorm

    def forward(
        self,
        x: Addend,
        residual: Tensor | None,
        forward_batch: ForwardBatch,
        closing: RMSNorm | None,
    ) -> tuple[Addend, Tensor]:
        """Like `DecoderLayer.forward`; `x` is never None."""
        if residual is None:
            assert isinstance(x, Tensor)
            residual, x = x, self.input_layernorm(x)
        else:
            x = self.input_layernorm.add_and_norm(x, residual, closing)
        # The products are normalised before they are added to the stream.
        out = self.self_attn(x, None, forward_batch)
        x = self.pre_feedforward_layernorm.add_and_norm(
            out, residual, self.post_attention_layernorm
        )
        return self.mlp(x, None), residual


GEMMA2 = DecoderTraits(norm_offset=1.0, scales_embedding=True, layer=SandwichLayer)


class Gemma2ForCausalLM(LlamaForCausalLM):
    traits = GEMMA2

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        if config.values.get("use_bidirectional_attention"):
            raise ValueError(
                f"{config.file}: use_bidirectional_attention is true: the model embeds "
                "texts and cannot generate them; models that generate have false"
            )
        super().__init__(config, rope_rows=rope_rows)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    traits = dataclasses.replace(GEMMA2, qk_norm=True)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    is_text_part = True
