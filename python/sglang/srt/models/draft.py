"""Base of the draft models that read a target's hidden states.

Owns the modules that come from the target, the hidden states that drafts read and the
names that published checkpoints use. Knows no proposals, trees or workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sglang.srt.layers.linear import Linear, LoadableParameter
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.models.llama import LoadableModel, check_activation

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.vocab_embedding import LMHead, VocabEmbedding
    from sglang.srt.models.stack import StackOutput

# Some checkpoints put all names below a module of this name.
PREFIX = "model."


class DraftModel(LoadableModel):
    """A head that drafts from a target's hidden states.

    Attributes:
        algorithm: the --speculative-algorithm it supports.
        embed_tokens, lm_head: None until the checkpoint or the target provides them.
        hot_token_ids: int64 [draft vocabulary], the target's id of each draft id, or
            None if both vocabularies are the same.
    """

    algorithm: ClassVar[str]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_activation(config)
        self.config = config
        self.embed_tokens: VocabEmbedding | None = None
        self.lm_head: LMHead | None = None
        self.hot_token_ids: Tensor | None = None
        self.logits_processor = LogitsProcessor()

    def set_embed_and_head(self, embed_tokens: VocabEmbedding, lm_head: LMHead) -> None:
        """Use the target's modules if the checkpoint has none.

        Call it before graphs are captured, because graphs keep the addresses.

        Raises:
            ValueError: the target's embedding has another width or vocabulary.
        """
        wanted = (self.config.vocab_size, self.config.hidden_size)
        found = embed_tokens.weight.full_shape()
        # A target may have more tokens than its head was trained with.
        if found[1] != wanted[1] or found[0] < wanted[0]:
            raise ValueError(
                f"{self.config.path} drafts for a model with vocab_size {wanted[0]} "
                f"and hidden_size {wanted[1]}, but the target has {found[0]} and "
                f"{found[1]}; use a head that was trained for this target"
            )
        if self.embed_tokens is None:
            self.embed_tokens = embed_tokens
        if self.lm_head is None:
            self.lm_head = lm_head

    def embed(self, input_ids: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """Embed token ids, or what a request gave in their place: [T] -> [T, H]."""
        assert self.embed_tokens is not None, "set_embed_and_head was not called"
        if forward_batch.input_embeds is not None:
            return forward_batch.input_embeds.embed(self.embed_tokens, input_ids)
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def forward_head(
        self, output: StackOutput, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Return the logits of `hidden` [T, H]. The next step reads `aux`, if any."""
        assert self.lm_head is not None, "set_embed_and_head was not called"
        return self.logits_processor(
            output.hidden, self.lm_head, forward_batch, aux_hidden=output.aux or None
        )


def target_hidden_states(forward_batch: ForwardBatch) -> Tensor:
    """Return the hidden states that the head reads, [T, channels]."""
    assert forward_batch.spec_info is not None
    hidden = forward_batch.spec_info.hidden_states
    assert hidden is not None
    return hidden


def strip_prefix(name: str) -> str:
    return name.removeprefix(PREFIX)


class StateProjection(Linear):
    """`fc`; every rank computes all outputs."""

    def __init__(self, input_size: int, output_size: int) -> None:
        weight = LoadableParameter.create(torch.empty(output_size, input_size))
        super().__init__(weight, None)
        self._output_size = output_size

    def add_bias(self) -> None:
        """Add a bias for a checkpoint that has one. Call it before loading weights."""
        self.bias = LoadableParameter.create(torch.empty(self._output_size))
