"""A prefix tree as plain data that can be kept, written down and rebuilt.

The arrays belong to the nodes, which replace but never change them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# msgspec resolves the annotations.
from sglang.srt.mem_cache.page_ledger import IntArray  # noqa: TC001
from sglang.srt.mem_cache.tree_node import TreeNode


class SavedRun(NamedTuple):
    """A node other than the root. `parent` is the index of its parent's run, or -1 for
    the root."""

    parent: int
    elements: IntArray
    slots: IntArray
    start: int
    namespace: str | None
    last_access: int
    serial: int
    lock_ref: int


@dataclass(frozen=True, kw_only=True)
class SavedTree:
    """All runs, parents before children, and the tree's counters."""

    runs: list[SavedRun]
    now: int
    next_serial: int


def save_runs(root: TreeNode) -> tuple[list[SavedRun], dict[int, int]]:
    """Return the runs below `root`, and the index of each by the `serial` of its node.
    Siblings keep their order, in which sweeps visit them."""
    runs: list[SavedRun] = []
    index: dict[int, int] = {}
    stack = [(child, -1) for child in reversed(root.children.values())]
    while stack:
        node, parent = stack.pop()
        at = index[node.serial] = len(runs)
        runs.append(
            SavedRun(
                parent,
                node.elements,
                node.slots,
                node.start,
                node.namespace,
                node.last_access,
                node.serial,
                node.lock_ref,
            )
        )
        if node.children:
            stack += [(child, at) for child in reversed(node.children.values())]
    return runs, index


def build_runs(
    runs: Sequence[SavedRun], root: TreeNode, *, page_size: int
) -> list[TreeNode]:
    """Add nodes for `runs` below `root` and return them in the same order.

    Raises:
        ValueError: a run comes before its parent, or does not follow it.
    """
    nodes: list[TreeNode] = []
    for run in runs:
        if not -1 <= run.parent < len(nodes) or len(run.elements) != len(run.slots):
            raise ValueError("a run of the tree has no parent")
        parent = root if run.parent < 0 else nodes[run.parent]
        if run.start != parent.end or not len(run.slots):
            raise ValueError("a run of the tree does not follow its parent")
        node = TreeNode(
            parent=parent,
            elements=run.elements,
            slots=run.slots,
            start=run.start,
            namespace=run.namespace,
            last_access=run.last_access,
            serial=run.serial,
        )
        node.lock_ref = run.lock_ref
        page = run.elements[:page_size].tobytes()
        edge: Hashable = page if run.start else (run.namespace, page)
        parent.children[edge] = node
        nodes.append(node)
    return nodes
