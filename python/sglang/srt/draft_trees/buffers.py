"""The tensors that tree operations fill: shapes, who writes them, and how to get fewer
rows of them. Allocated once, so that captured graphs may hold their addresses.
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
        scores: [b, K + K*K*(S-1)] float32, product of the probabilities on the path.
        tokens: like scores, int64, ids of the target's vocabulary.
        parents: [b, 1 + K*(S-1)] int64, per group of K candidates the flat index of the
            candidate that they follow; group 0: -1, the root.
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
        """The first `rows` requests, same memory."""
        return _narrow(self, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """The trees of b requests, D nodes each; node 0 is the root, parents precede
    children. Written by `build_tree`; contiguous.

    Fields, [b, D] int64 unless said:
        tokens: the root's token and the drafted ones.
        positions: KV length + depth.
        parent_index: place of the parent among all b * D nodes; -1 for the root and for
            a node whose parent was not selected, which is in no child list and sees
            itself and the prefix only.
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
        """The first `rows` requests, same memory."""
        return _narrow(self, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Tokens that verification accepted, for b requests; int64, contiguous.

    Fields:
        predict: [b, D], the token that follows a node of the accepted path; 0 at the
            other nodes.
        accept_index: [b, S + 1], places of the accepted path among all b * D nodes, the
            root first, padded with -1.
        accept_lens: [b], tokens gained, 1 .. S + 1: the accepted drafts and the bonus.
        rejected: [b, K], tokens that the last accepted node's children proposed in
            vain, padded with -1; written by sampling verification only.
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
        """The first `rows` requests, same memory."""
        return _narrow(self, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCandidates:
    """The K most probable next tokens of R rows; written by `top_k_probs`.

    Fields:
        probs: [R, K] float32. ids: [R, K] int64, of the draft's vocabulary.
    """

    probs: Tensor
    ids: Tensor

    @classmethod
    def allocate(
        cls, rows: int, topk: int, *, device: torch.device | str
    ) -> DraftCandidates:
        return cls(
            probs=torch.zeros((rows, topk), dtype=torch.float32, device=device),
            ids=torch.zeros((rows, topk), dtype=torch.int64, device=device),
        )
