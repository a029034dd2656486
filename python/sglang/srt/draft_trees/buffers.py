"""The tensors that tree operations fill: their shapes, who writes them, and views of
fewer rows. Allocated once, so that captured graphs may hold their addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape

Buffers = TypeVar("Buffers", "DraftLevels", "DraftTree", "VerifyResult")


def _narrow(buffers: Buffers, rows: int) -> Buffers:
    parts = {f.name: getattr(buffers, f.name)[:rows] for f in fields(buffers)}
    return type(buffers)(**parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLevels:
    """Candidates of all draft steps of b requests, levels side by side. Candidate
    r * K + c of level i >= 1 has the flat index K + K * K * (i - 1) + r * K + c.

    Fields, all contiguous and written by `select_top_k`:
        scores: [b, K + K*K*(S-1)] float32, product of the probabilities along the path.
        tokens: like scores, int64, ids of the target's vocabulary.
        parents: [b, 1 + K*(S-1)] int64; for each group of K candidates the flat index
            of the candidate they follow, or -1, the root, for group 0.
        beam_scores: [b, K] float32, scores of the branches that were kept.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor
    beam_scores: Tensor

    @classmethod
    def allocate(
        cls, rows: int, shape: TreeShape, *, device: torch.device | str
    ) -> DraftLevels:
        flat = (rows, shape.num_candidates)
        return cls(
            scores=torch.zeros(flat, dtype=torch.float32, device=device),
            tokens=torch.zeros(flat, dtype=torch.int64, device=device),
            parents=torch.zeros(
                (rows, shape.num_groups), dtype=torch.int64, device=device
            ),
            beam_scores=torch.zeros(
                (rows, shape.topk), dtype=torch.float32, device=device
            ),
        )

    def narrow(self, rows: int) -> DraftLevels:
        """Return the first `rows` requests, in the same memory."""
        return _narrow(self, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """The trees of b requests, D nodes each; node 0 is the root, parents precede
    children. Written by `build_tree`; contiguous.

    Fields, [b, D] int64 unless said:
        tokens: the root's token and the drafted ones.
        positions: KV length + depth.
        parent_index: the parent's index among all b * D nodes. -1 for the root and for
            a node whose parent was not selected; such a node is in no child list and
            sees only itself and the prefix.
        next_token: first child within the request, or -1; children ascend.
        next_sibling: next child of the same parent within the request, or -1.
        mask: [b, D, D] bool, mask[q, i, j]: node i may attend node j.
        selected: [b, D - 1] int64, flat indices of the candidates that became nodes.
    """

    tokens: Tensor
    positions: Tensor
    parent_index: Tensor
    next_token: Tensor
    next_sibling: Tensor
    mask: Tensor
    selected: Tensor

    @classmethod
    def allocate(
        cls, rows: int, shape: TreeShape, *, device: torch.device | str
    ) -> DraftTree:
        nodes = shape.num_draft_tokens

        def longs(width: int) -> Tensor:
            return torch.zeros((rows, width), dtype=torch.int64, device=device)

        return cls(
            tokens=longs(nodes),
            positions=longs(nodes),
            parent_index=longs(nodes),
            next_token=longs(nodes),
            next_sibling=longs(nodes),
            mask=torch.zeros((rows, nodes, nodes), dtype=torch.bool, device=device),
            selected=longs(nodes - 1),
        )

    def narrow(self, rows: int) -> DraftTree:
        """Return the first `rows` requests, in the same memory."""
        return _narrow(self, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Tokens that verification accepted, for b requests; int64, contiguous.

    Fields:
        predict: [b, D], the token after each node of the accepted path; 0 at other
            nodes.
        accept_index: [b, S + 1], indices of the accepted path among all b * D nodes,
            root first, padded with -1.
        accept_lens: [b], tokens gained, 1 .. S + 1: accepted drafts plus the bonus.
        rejected: [b, K], tokens proposed in vain by children of the last accepted node,
            padded with -1; only written by sampling verification.
    """

    predict: Tensor
    accept_index: Tensor
    accept_lens: Tensor
    rejected: Tensor

    @classmethod
    def allocate(
        cls, rows: int, shape: TreeShape, *, device: torch.device | str
    ) -> VerifyResult:
        def longs(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        return cls(
            predict=longs(rows, shape.num_draft_tokens),
            accept_index=longs(rows, shape.accept_width),
            accept_lens=longs(rows),
            rejected=longs(rows, shape.topk),
        )

    def narrow(self, rows: int) -> VerifyResult:
        """Return the first `rows` requests, in the same memory."""
        return _narrow(self, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCandidates:
    """The K most probable next tokens of R rows; written by `top_k_probs`.

    Fields:
        probs: [R, K] float32. ids: [R, K] int64, in the draft's vocabulary.
    """

    probs: Tensor
    ids: Tensor

    def best(self, count: int) -> DraftCandidates:
        """Return the first `count` of each row, contiguous."""
        if count == self.ids.shape[1]:
            return self
        return DraftCandidates(
            probs=self.probs[:, :count].contiguous(),
            ids=self.ids[:, :count].contiguous(),
        )

    @classmethod
    def allocate(
        cls, rows: int, topk: int, *, device: torch.device | str
    ) -> DraftCandidates:
        return cls(
            probs=torch.zeros((rows, topk), dtype=torch.float32, device=device),
            ids=torch.zeros((rows, topk), dtype=torch.int64, device=device),
        )
