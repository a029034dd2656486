"""Sampled tokens, and accepted paths of draft trees, as the canary records them.

Holds tensors; launches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from kv_canary.findings import STATUS_WORDS
from kv_canary.view import ForwardView


class SampledTokens(NamedTuple):
    """Tokens that were drawn for R rows; int64 [R] each, contiguous.

    `tokens`: each row's token at position prefix_lens + extend_lens, or negative if
        there is
    none and the next input is unknown. The others are as in `ForwardView`.
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
        tokens, parent_index: [b, D], of the nodes; a parent is an index among all b * D
            nodes, or -1.
        predict: [b, D], the token that follows each node of the path.
        accept_index: [b, W], indices of the path among all nodes, the root first.
        accept_lens: [b], number of nodes on the path, 1 .. W.
        gained: [b, W], the tokens that requests gain, in order.
        choices: [b, D], the target's choice after each node if it alone decides, or
            None.
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
        """Return all tensors, in order."""
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

    def last(self) -> SampledTokens:
        """Return the last token that each row gained."""
        place = self.accept_lens.clamp(1, self.width)[:, None] - 1
        return SampledTokens(
            req_rows=self.req_rows,
            serials=self.serials,
            tokens=self.gained.gather(1, place).view(-1),
            prefix_lens=self.prefix_lens,
            extend_lens=self.accept_lens,
        )

    def rows(self, salts: Tensor) -> ForwardView:
        """Return the tokens whose KV stays, the root and the accepted drafts, as rows
        of `width` tokens with unknown slots. `salts`: as in `ForwardView`."""
        steps = torch.arange(self.width, device=self.gained.device)
        inputs = torch.cat((self.tokens[:, :1], self.gained[:, :-1]), dim=1).view(-1)
        offsets = torch.arange(self.num_rows + 1, device=self.gained.device)
        return ForwardView(
            req_rows=self.req_rows,
            prefix_lens=self.prefix_lens,
            extend_lens=self.accept_lens.clamp(0, self.width),
            input_ids=inputs,
            positions=(self.prefix_lens[:, None] + steps).view(-1),
            out_cache_loc=torch.full_like(inputs, -1),
            serials=self.serials,
            salts=salts,
            qo_indptr=offsets * self.width,
        )

    def check_layout(self) -> None:
        """Check for kernels that index raw memory and would misread another layout.

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


class AcceptedWords(NamedTuple):
    """The words that a verification sends to the host, as one int64 vector.

    ```
    words  | gained [b, W] | accept_lens [b] | findings | of the draft | marks [2, b] |
    ```
    The other fields are its parts; findings are [STATUS_WORDS + b] each, or empty for
    drafts that have no pool.
    """

    words: Tensor
    gained: Tensor
    accept_lens: Tensor
    findings: Tensor
    draft_findings: Tensor
    marks: Tensor

    @classmethod
    def of(cls, path: AcceptedPath, *, has_draft: bool = True) -> AcceptedWords:
        """Allocate words for a path. `has_draft`: whether the draft has a pool."""
        rows = path.num_rows
        own = STATUS_WORDS + rows
        sizes = [rows * path.width, rows, own, own * has_draft, 2 * rows]
        words = path.gained.new_empty(sum(sizes))
        gained, accept_lens, found, drafts, marks = words.split_with_sizes(sizes)
        return cls(
            words=words,
            gained=gained.view(rows, path.width),
            accept_lens=accept_lens,
            findings=found,
            draft_findings=drafts,
            marks=marks.view(2, rows),
        )
