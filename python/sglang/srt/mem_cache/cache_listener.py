"""The interface for listeners to the runs of tokens that the prefix cache holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree_node import TreeNode


class CacheListener(Protocol):
    """Hears of every change to the set of cached pages while it happens.

    `TreeNode.block_hashes` belongs to the listener: the cache hands over nodes and does
    not read it. A run that loses only its window slots stays cached.
    """

    def on_stored(self, node: TreeNode) -> None:
        """`node` was hung below its parent, which was there before."""

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` took over the beginning of `lower`, which keeps the rest."""

    def on_removed(self, node: TreeNode, rest: TreeNode | None) -> None:
        """`node` left the tree; `rest`, a new node, has its first pages."""

    def on_cleared(self) -> None:
        """The tree is empty."""
