"""The interface for listeners to the runs of tokens that the prefix cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree_node import TreeNode


class CacheListener:
    """Hears of every change to the set of cached pages while it happens. Subclasses
    override what they need.

    `TreeNode.block_hashes` belongs to the listener of KV events: the cache hands over
    nodes and does not read it. A run that loses only its window slots stays cached.
    """

    def on_stored(self, node: TreeNode) -> None:
        """`node` was hung below its parent, which was there before."""

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` took over the beginning of `lower`, which keeps the rest."""

    def on_evicting(self, leaf: TreeNode, keep: int) -> None:
        """The slots after the first `keep` of `leaf` are about to be freed."""

    def on_cutting(self, nodes: Sequence[TreeNode]) -> None:
        """Damaged runs are about to leave the tree."""

    def on_removed(self, node: TreeNode, rest: TreeNode | None) -> None:
        """`node` left the tree; `rest`, a new node, has its first pages."""

    def on_cleared(self) -> None:
        """The tree is empty."""
