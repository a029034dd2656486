"""Sampled tokens, and accepted paths of draft trees, as the canary notes them.

Holds tensors; launches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor


class SampledTokens(NamedTuple):
    """Tokens that were drawn for R rows; int64 [R] each, contiguous.

    `tokens`: of each row, at position prefix_lens + extend_lens; negative: none, so
    that its next input is not known. The others as in `ForwardView`.
    """

    req_rows: Tensor
    serials: Tensor
    tokens: Tensor
    prefix_lens: Tensor
    extend_lens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedPath:
    """The accepted paths of b trees of D nodes; int64, contiguous.

    Fields:
        req_rows, serials, prefix_lens: [b], as in `ForwardView`.
        tokens, parent_index: [b, D], of the nodes; a parent is a place among all b * D
            nodes, -1: none.
        predict: [b, D], the token that follows each node of the path.
        accept_index: [b, W], places of the path among all nodes, the root first.
        accept_lens: [b], nodes of the path, 1 .. W.
        gained: [b, W], the tokens that requests gain, in order.
        choices: [b, D] | None, the target's choice after each node, where it alone
            decides.
    """

    req_rows: Tensor
    serials: Tensor
    prefix_lens: Tensor
    tokens: Tensor
    parent_index: Tensor
    predict: Tensor
    accept_index: Tensor
    accept_lens: Tensor
    gained: Tensor
    choices: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        """All of them, in order."""
        return [getattr(self, f.name) for f in fields(self)]

    @property
    def num_rows(self) -> int:
        return self.req_rows.shape[0]

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def width(self) -> int:
        return self.accept_index.shape[1]

    def check_layout(self) -> None:
        """For kernels that index raw memory, where another layout would be misread.

        Raises:
            ValueError: a tensor has another shape, or is not contiguous int64.
        """
        rows, nodes, width = self.num_rows, self.nodes, self.width
        shapes = {
            "tokens": (rows, nodes),
            "parent_index": (rows, nodes),
            "predict": (rows, nodes),
            "choices": (rows, nodes),
            "accept_index": (rows, width),
            "gained": (rows, width),
        }
        for f in fields(self):
            t = getattr(self, f.name)
            shape = shapes.get(f.name, (rows,))
            if t is None:
                continue
            if t.dtype is not torch.int64 or t.shape != shape or not t.is_contiguous():
                raise ValueError(
                    f"AcceptedPath: {f.name} is {t.dtype} of shape {list(t.shape)}; it "
                    f"must be contiguous int64 {list(shape)}"
                )
