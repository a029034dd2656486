"""Structural check of the prefix tree: a debugging aid that only knows nodes."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree_node import TreeNode


def check_tree(root: TreeNode, *, page_size: int, queued: Set[int]) -> None:
    """Verify links, lengths, locks, stamps and the eviction queue below `root`.

    Args:
        root: the tree; its own run is empty.
        page_size: every run and every page of slots is a whole number of these.
        queued: ids of the nodes that have an entry in the eviction queue.

    Raises:
        RuntimeError: names the first node that breaks a rule.
    """
    seen: list[np.ndarray] = []
    stack = list(root.children.items())
    if root.parent is not None or len(root.slots) or root.lock_ref:
        raise RuntimeError(f"{root} is not a root")
    for node in root.children.values():
        _require(node.parent is root and node.start == 0, node, "not at the root")
    while stack:
        edge, node = stack.pop()
        page = node.elements[:page_size].tobytes()
        key = page if node.start else (node.namespace, page)
        _require(edge == key, node, "hangs under a wrong edge")
        _check_node(node, page_size, queued)
        for child in node.children.values():
            _require(child.parent is node, child, "has a wrong parent")
            _require(child.start == node.end, child, "starts at a wrong position")
            _require(child.namespace == node.namespace, child, "has a wrong namespace")
            _require(child.lock_ref <= node.lock_ref, child, "locked more than parent")
            _require(child.last_access <= node.last_access, child, "newer than parent")
        seen.append(node.slots)
        stack.extend(node.children.items())
    if seen:
        slots, counts = np.unique(np.concatenate(seen), return_counts=True)
        if counts.max() > 1:
            raise RuntimeError(f"slot {int(slots[counts.argmax()])} is cached twice")


def _check_node(node: TreeNode, page_size: int, queued: Set[int]) -> None:
    size = len(node.slots)
    _require(size > 0 and size % page_size == 0, node, "is not whole pages")
    _require(len(node.elements) == size, node, "does not have one slot per element")
    pages = node.slots.reshape(-1, page_size)
    expected = pages[:, :1] + np.arange(page_size)
    in_order = (pages == expected).all() and not (pages[:, 0] % page_size).any()
    _require(bool(in_order), node, "has slots out of their page order")
    _require(node.queued == (id(node) in queued), node, "has a wrong queue mark")
    evictable = not node.children and node.lock_ref == 0
    _require(node.queued or not evictable, node, "is evictable but not queued")


def _require(condition: bool, node: TreeNode, what: str) -> None:
    if not condition:
        raise RuntimeError(f"{node} {what}")
