"""Whoever wants to know which runs of tokens the prefix cache holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree_node import TreeNode


class CacheListener(Protocol):
    """Hears of every change of the set of cached pages, while it happens.

    `TreeNode.block_hashes` is its to fill: the cache hands over nodes and does not
    read it.
    A run that loses its window slots alone stays cached.
    """

    def on_stored(self, node: TreeNode) -> None:
        """`node` was hung below its parent, which was there before."""

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` took over the begin of `lower`, which keeps the rest."""

    def on_removed(self, node: TreeNode, rest: TreeNode | None) -> None:
        """`node` left the tree; `rest`, a new node, has its first pages."""

    def on_cleared(self) -> None:
        """The tree is empty."""
