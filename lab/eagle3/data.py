"""Batches of the documents that a target wrote.

Knows padding; refuses to know models, heads and losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lab.eagle3.record import Document

# Documents whose lengths are sorted together, so that little of a batch is padding.
POOL_BATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Documents padded to one length: the fields of `Document` with a batch dimension.
    `best` is -1 after the end of a document.
    """

    ids: Tensor
    aux: Tensor
    hidden: Tensor
    best: Tensor


def batches(
    documents: list[Document], *, size: int, unroll: int, seed: int
) -> Iterator[Batch]:
    """Yield batches of `size` documents without end, in a new order in each epoch."""
    usable = [d for d in documents if len(d.ids) > unroll + 1]
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(usable))
        for start in range(0, len(order), size * POOL_BATCHES):
            pool = sorted(
                order[start : start + size * POOL_BATCHES],
                key=lambda i: len(usable[i].ids),
            )
            groups = [pool[at : at + size] for at in range(0, len(pool), size)]
            for index in rng.permutation(len(groups)):
                yield pad([usable[i] for i in groups[index]])


def pad(documents: list[Document]) -> Batch:
    def padded(name: str, value: float = 0.0) -> Tensor:
        parts = [getattr(document, name) for document in documents]
        return pad_sequence(parts, batch_first=True, padding_value=value)

    return Batch(
        ids=padded("ids"),
        aux=padded("aux"),
        hidden=padded("hidden"),
        best=padded("best", -1),
    )
