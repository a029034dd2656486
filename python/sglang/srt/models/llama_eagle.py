"""EAGLE's draft model for Llama-type targets (Li et al., 2024).

Decoder layers over a mix of the next token and the target's final hidden state,
followed by the target's head.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sglang.srt.distributed.parallel_state import summed
from sglang.srt.layers.ops.decoder_stack import StackInput
from sglang.srt.layers.radix_attention import run_stack
from sglang.srt.layers.rotary_embedding import shared_cos_sin_cache
from sglang.srt.models.draft import (
    DraftModel,
    StateProjection,
    strip_prefix,
    target_hidden_states,
)
from sglang.srt.models.llama import DecoderBlock, DecoderLayer, DecoderTraits
from sglang.srt.models.stack import StackOutput
from sglang.srt.models.whole_stack import PlainLayer, plan_stack

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import Addend
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.ops.decoder_stack import StackPlan

# Published heads may carry copies of the target's modules.
TARGET_PARTS = ("embed_tokens.weight", "lm_head.weight")


class EagleFirstLayer(DecoderBlock):
    """Decoder layer that reads `fc`'s output directly; it has no input norm."""

    def forward(
        self, x: Tensor, residual: Tensor | None, forward_batch: ForwardBatch
    ) -> tuple[Addend | None, Tensor]:
        """Like `DecoderLayer.forward`; x [T, H] is overwritten, `residual` is None."""
        assert residual is None
        return self.run(x, x, forward_batch)


class LlamaForCausalLMEagle(DraftModel):
    """EAGLE draft model.

    The forward maps token p + 1 and the target's normalised hidden state [T, H] at
    position p (`forward_batch.spec_info`) to the logits of token p + 2 and an estimate
    of the target's next state.
    """

    algorithm = "EAGLE"
    traits = DecoderTraits()

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        super().__init__(config)
        cos_sin_cache = shared_cos_sin_cache(
            config.rope, head_dim=config.head_dim, rows=rope_rows
        )
        self.fc = StateProjection(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList(
            (DecoderLayer if i else EagleFirstLayer)(
                config, self.traits, layer_id=i, cos_sin_cache=cos_sin_cache
            )
            for i in range(config.num_layers)
        )

    def add_optional_parts(self, names: Iterable[str]) -> None:
        if "fc.bias" in {strip_prefix(name) for name in names}:
            self.fc.add_bias()

    def own_name(self, name: str) -> str | None:
        own = strip_prefix(name)
        return None if own in TARGET_PARTS else own

    def forward_stack(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> StackOutput:
        embedded = self.embed(input_ids, forward_batch)
        states = target_hidden_states(forward_batch)
        stream = self.fc(torch.cat((embedded, states), dim=-1))
        if self._plan is not None:
            # The first layer reads its stream before it adds to it.
            given = StackInput(stream, first=stream)
            whole = run_stack(self._plan, given, forward_batch)
            if whole is not None:
                return StackOutput(whole.hidden, [])
        pending: Addend | None = stream
        residual: Tensor | None = None
        for layer in self.layers:
            pending, residual = layer(pending, residual, forward_batch)
        assert residual is not None
        stream = residual if pending is None else summed(pending) + residual
        return StackOutput(stream, [])

    @cached_property
    def _plan(self) -> StackPlan | None:
        """Plan the one-operator form of the layers. Made at the first forward."""
        layers: list[Any] = list(self.layers)
        norms = [None, *(layer.input_layernorm for layer in layers[1:])]
        plain = [
            PlainLayer(layer, layer.self_attn, layer.mlp, norm)
            for layer, norm in zip(layers, norms, strict=True)
        ]
        return plan_stack(plain, None, first=self.config.hidden_size)
