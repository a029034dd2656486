"""Draft trees, derived from their verification's attention mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kv_canary.engines.hooks import Refusal


class Tree(NamedTuple):
    """Trees of R rows of D nodes.

    Fields:
        parents: int64 [R * D], indices among all nodes, or -1 for the root.
        mask: bool [R * D, D] | None, nodes of its row that a node attends to.
    """

    parents: Tensor
    mask: Tensor | None


def make_chains(rows: int, nodes: int, device: torch.device) -> Tree:
    """Return trees in which each node follows the one before it."""
    place = torch.arange(rows * nodes, device=device)
    return Tree(torch.where(place % nodes == 0, -1, place - 1), None)


def find_trees(mask: Tensor, prefix_lens: Tensor, nodes: int) -> Tree:
    """Return the trees that a mask over prefixes and nodes was made from.

    Ancestors precede a node, so its parent is the last other node that it attends to.
    This neither waits for the device nor lets a value decide a shape.

    Args:
        mask: bool, row after row [D, prefix_lens[r] + D] in one vector, which may be
            longer.
        prefix_lens: int64 [R].
    """
    rows, device = len(prefix_lens), prefix_lens.device
    widths = prefix_lens + nodes
    begins = nodes * (widths.cumsum(0) - widths)
    node = torch.arange(nodes, device=device)
    place = begins[:, None, None] + node[:, None] * widths[:, None, None]
    place = place + prefix_lens[:, None, None] + node
    attends = mask.view(-1)[place.clamp(max=mask.numel() - 1)].bool()
    before = attends & (node < node[:, None])
    parent = torch.where(before, node, -1).amax(dim=2)
    first = torch.arange(rows, device=device)[:, None] * nodes
    parents = torch.where(parent >= 0, parent + first, -1)
    return Tree(parents.reshape(-1), attends.reshape(-1, nodes))


class Trees:
    """The trees of the verification that is about to run, at fixed addresses.

    A captured verification has its own mask in its batch, but that is not filled later:
    attention gets another. So the trees come from the batch that the runner gets,
    outside the graph, and the graph reads them here.

    Args:
        rows: most rows.
        width: most nodes of a tree; 0 if nothing is verified.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._width = width
        self._parents = make_chains(rows, max(width, 1), device).parents
        self._mask = torch.zeros(rows * width * width, dtype=torch.bool, device=device)

    def begin(self, mask: Tensor | None, prefix_lens: Tensor, nodes: int) -> None:
        """Record the trees of a verification; arguments as in `find_trees`. Without a
        mask each node follows the one before it.

        Raises:
            Refusal: trees have more nodes than were announced.
        """
        if nodes > self._width:
            raise Refusal(
                f"looked for trees of {self._width} nodes at most, found {nodes}"
            )
        rows = len(prefix_lens)
        if mask is None:
            tree = make_chains(rows, nodes, prefix_lens.device)
            attends = _chain_mask(rows, nodes, prefix_lens.device)
        else:
            tree = find_trees(mask, prefix_lens, nodes)
            assert tree.mask is not None
            attends = tree.mask
        self._parents[: rows * nodes].copy_(tree.parents)
        self._mask[: rows * nodes * nodes].copy_(attends.reshape(-1))

    def of(self, rows: int, nodes: int) -> Tree:
        """Return views of the first rows' trees; padding rows may hold anything."""
        mask = self._mask[: rows * nodes * nodes].view(rows * nodes, nodes)
        return Tree(self._parents[: rows * nodes], mask)


def _chain_mask(rows: int, nodes: int, device: torch.device) -> Tensor:
    below = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
    return below.repeat(rows, 1)
