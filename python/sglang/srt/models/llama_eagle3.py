"""EAGLE3's draft model for Llama-type targets (Li et al., 2025).

One layer over the next token and hidden states of three of the target's layers, with
its own head over the most frequent tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.configs.draft_config import hidden_source_size, num_hidden_sources
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import LoadableParameter
from sglang.srt.layers.ops.decoder_stack import StackInput
from sglang.srt.layers.radix_attention import run_stack
from sglang.srt.layers.rotary_embedding import shared_cos_sin_cache
from sglang.srt.layers.vocab_embedding import LMHead, VocabEmbedding
from sglang.srt.models.draft import (
    DraftModel,
    StateProjection,
    strip_prefix,
    target_hidden_states,
)
from sglang.srt.models.llama import DecoderBlock, DecoderTraits
from sglang.srt.models.stack import StackOutput
from sglang.srt.models.whole_stack import PlainLayer, plan_stack

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.ops.decoder_stack import StackPlan

FIRST_LAYER = "layers.0."
MIDLAYER = "midlayer."


def _draft_vocab_size(config: ModelConfig) -> int:
    size: int = config.values.get("draft_vocab_size") or config.vocab_size
    if size > config.vocab_size:
        raise config.values.wrong(
            "draft_vocab_size", f"must be at most vocab_size, {config.vocab_size}"
        )
    return size


class Eagle3Layer(DecoderBlock):
    """Layer whose attention reads the token and the hidden state, both normalised."""

    def __init__(
        self, config: ModelConfig, traits: DecoderTraits, *, cos_sin_cache: Tensor
    ) -> None:
        super().__init__(
            config,
            traits,
            layer_id=0,
            cos_sin_cache=cos_sin_cache,
            input_size=2 * config.hidden_size,
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def both(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Combine [T, H] each into the input of attention, [T, 2 * H]."""
        return torch.cat(
            (self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1
        )


class LlamaForCausalLMEagle3(DraftModel):
    """EAGLE3 draft model.

    The forward maps token p + 1 and hidden states at position p
    (`forward_batch.spec_info`), either the target's [T, sources * H] or this model's
    own [T, H], to the logits of token p + 2 over the draft vocabulary and to the stream
    before the final norm, which the next step reads.
    """

    algorithm = "EAGLE3"
    traits = DecoderTraits()

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        super().__init__(config)
        if config.num_layers != 1:
            raise ValueError(
                f"{config.file}: an EAGLE3 head has one layer, got "
                f"num_hidden_layers {config.num_layers}"
            )
        self.draft_vocab_size = _draft_vocab_size(config)
        self.fc = StateProjection(
            num_hidden_sources(config) * hidden_source_size(config), config.hidden_size
        )
        self.midlayer = Eagle3Layer(
            config,
            self.traits,
            cos_sin_cache=shared_cos_sin_cache(
                config.rope, head_dim=config.head_dim, rows=rope_rows
            ),
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.d2t: LoadableParameter | None = None
        if self.draft_vocab_size < config.vocab_size:
            self.lm_head = LMHead(self.draft_vocab_size, config.hidden_size)
            self._add_vocabulary_map()

    def _add_vocabulary_map(self) -> None:
        zeros = torch.zeros(self.draft_vocab_size, dtype=torch.int64)
        self.d2t = LoadableParameter.create(zeros)

    def add_optional_parts(self, names: Iterable[str]) -> None:
        given = {self.own_name(name) for name in names}
        config = self.config
        if "embed_tokens.weight" in given:
            self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        if "lm_head.weight" in given and self.lm_head is None:
            self.lm_head = LMHead(config.vocab_size, config.hidden_size)
        if "d2t" in given and self.d2t is None:
            self._add_vocabulary_map()
        if "fc.bias" in given:
            self.fc.add_bias()

    def own_name(self, name: str) -> str | None:
        own = strip_prefix(name)
        if own == "t2d":  # redundant: lists the tokens that d2t reaches
            return None
        if own.startswith(FIRST_LAYER):
            return MIDLAYER + own.removeprefix(FIRST_LAYER)
        return own

    def finish_loading(self, source: str) -> None:
        """Derive `hot_token_ids`: d2t holds the target's ids minus the draft's."""
        if self.d2t is None:
            return
        draft_ids = torch.arange(self.draft_vocab_size, device=self.d2t.device)
        ids = self.d2t.data + draft_ids
        is_outside = (ids < 0) | (ids >= self.config.vocab_size)
        if bool(is_outside.any()):
            first = int(is_outside.nonzero()[0, 0])
            raise ValueError(
                f"{source}: d2t maps draft token {first} to {int(ids[first])}, outside "
                f"the target's vocabulary of {self.config.vocab_size}; d2t must hold "
                "differences, target id minus draft id"
            )
        self.hot_token_ids = ids

    def forward_stack(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> StackOutput:
        embedded = self.embed(input_ids, forward_batch)
        hidden = target_hidden_states(forward_batch)
        # The layer adds to its stream in place, and the caller keeps these states.
        is_own = hidden.shape[-1] == embedded.shape[-1]
        stream = hidden.clone() if is_own else self.fc(hidden)
        x = self.midlayer.both(embedded, stream)
        if self._plan is not None:
            given = StackInput(stream, first=x)
            whole = run_stack(self._plan, given, forward_batch)
            if whole is not None:
                return StackOutput(whole.hidden, [stream])
        pending, residual = self.midlayer.run(x, stream, forward_batch)
        normed = self.norm.add_and_norm(pending, residual)
        return StackOutput(normed, [residual])

    @cached_property
    def _plan(self) -> StackPlan | None:
        """Plan the one-operator form of layer and norm. Made at the first forward."""
        layer: Any = self.midlayer
        plain = PlainLayer(layer, layer.self_attn, layer.mlp, None)
        return plan_stack([plain], self.norm, first=2 * self.config.hidden_size)
