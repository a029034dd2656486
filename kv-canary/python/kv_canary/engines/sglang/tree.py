"""A draft tree from the mask that its verification attends under."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    """Trees of R rows of D nodes.

    Fields:
        parents: int64 [R * D], places among all nodes, -1: the root's.
        mask: bool [R * D, D] | None, nodes of its row that a node attends to.
    """

    parents: Tensor
    mask: Tensor | None


def chain_of(rows: int, nodes: int, device: torch.device) -> Tree:
    """Each node follows the one before it."""
    place = torch.arange(rows * nodes, device=device)
    return Tree(torch.where(place % nodes == 0, -1, place - 1), None)


def tree_of(mask: Tensor, prefix_lens: Tensor, nodes: int) -> Tree:
    """The trees that a mask over prefixes and nodes was made from.

    A node comes after its ancestors, so that its parent is the last other node that it
    attends to. Neither waits for the device nor depends on its values in any shape.

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
