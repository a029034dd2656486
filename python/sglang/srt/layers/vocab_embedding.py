"""Token embedding and the head that maps hidden states to logits.

Under tensor parallelism each rank holds an interval of the vocabulary. If it does not
divide evenly, the last ranks are padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.distributed.partition import divide_padded, padded_size
from sglang.srt.layers.linear import Linear, LoadableParameter
from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.linear.op import PackedWeight, unpack_weight


class VocabEmbedding(Module):
    """Rows of a table [vocab_size, hidden_size].

    Args:
        scale: factor on the rows, rounded to the dtype of the table. A head that shares
            the table does not apply it.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = _vocab_parameter(vocab_size, hidden_size)
        self._scale = torch.tensor(scale, dtype=self.weight.dtype, device="cpu").item()
        self._group = get_tp_group()
        self._part = divide_padded(vocab_size, self._group)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden_size]."""
        found = self._rows(input_ids)
        return found if self._scale == 1.0 else found.mul_(self._scale)

    def _rows(self, input_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return functional.embedding(input_ids, self.weight)
        rows = input_ids - self._part.start
        is_elsewhere = (rows < 0) | (rows >= self._part.size)
        found = functional.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        found = found.masked_fill(is_elsewhere[:, None], 0.0)
        return self._group.all_reduce(found)


class LMHead(Linear):
    """Logits of the whole vocabulary; may share the embedding's weight."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        parameter = _vocab_parameter(vocab_size, hidden_size)
        super().__init__(parameter, None, is_plain=True)
        self._vocab_size = vocab_size
        self._group = get_tp_group()

    def tie(self, embedding: VocabEmbedding) -> None:
        """Use the embedding's table as the weight. The packed form stays separate."""
        self.weight = embedding.weight

    def rows(self, token_ids: Tensor) -> Tensor:
        """Return the weights of these entries (int64 [n]), [n, hidden_size]. Only if
        this rank holds the whole head."""
        weight = self._any_weight()
        assert isinstance(weight, (Tensor, PackedWeight)), "a head is plain"
        whole = unpack_weight(weight) if isinstance(weight, PackedWeight) else weight
        return whole.data.index_select(0, token_ids)

    def forward(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[T, hidden_size] -> [T, vocab_size], the same bits on all ranks."""
        logits = super().forward(x, out=out)
        if self._group.size == 1:
            return logits
        padded = self._group.all_gather_last_dim(logits)
        return padded[:, : self._vocab_size].contiguous()


def _vocab_parameter(vocab_size: int, hidden_size: int) -> LoadableParameter:
    group = get_tp_group()
    part, room = divide_padded(vocab_size, group), padded_size(vocab_size, group)
    allocate = torch.empty if part.size == room else torch.zeros
    return LoadableParameter.create(allocate(room, hidden_size), {None: part})
