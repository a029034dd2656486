"""Token embedding and the head that maps hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sglang.srt.layers.linear import Linear, LoadableParameter
from sglang.srt.layers.module import Module


class VocabEmbedding(Module):
    """Rows of a table [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = LoadableParameter.create(torch.empty(vocab_size, hidden_size))

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden_size]."""
        return functional.embedding(input_ids, self.weight)


class LMHead(Linear):
    """Logits of every vocabulary entry; may share the embedding's weight."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def tie(self, embedding: VocabEmbedding) -> None:
        """Use the embedding's table as the weight; the packed form stays separate."""
        self.weight = embedding.weight
