"""The node of the prefix tree, which also serves as a handle to it.

Plain data. Only the cache changes it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sglang.srt.mem_cache.groups.runs import RunMark
    from sglang.srt.mem_cache.page_ledger import IntArray

HashArray = NDArray[np.uint64]

EMPTY: IntArray = np.empty(0, dtype=np.int64)
NO_HASHES: HashArray = np.empty(0, dtype=np.uint64)


class TreeNode:
    """One run of cached positions [start, start + len(slots)) of a token sequence.

    Fields:
        elements: int64 [n], key elements (`RadixKey.elements`) of the run.
        slots: int64 [n] on the host, the KV slot of each position.
        start: position of the first element.
        namespace: cache namespace of the sequence.
        children: next runs, keyed by their first page of elements.
        parent: previous run; None for a root and for a node cut off the tree.
        lock_ref: requests that rely on this run or on one below it.
        hits: number of locks ever taken; the upper part of a split run keeps earlier
            ones.
        last_access: logical time of the last match or insert through this run.
        serial: order of creation, breaks ties.
        queued: whether the eviction queue has an entry for this node.
        marks: what the run has in each secondary group of the cache.
        block_hashes: uint64 [pages], belongs to the cache's listener, which fills it.
    """

    __slots__ = (
        "block_hashes",
        "children",
        "elements",
        "hits",
        "last_access",
        "lock_ref",
        "marks",
        "namespace",
        "parent",
        "queued",
        "serial",
        "slots",
        "start",
    )

    def __init__(
        self,
        *,
        parent: TreeNode | None = None,
        elements: IntArray = EMPTY,
        slots: IntArray = EMPTY,
        start: int = 0,
        namespace: str | None = None,
        last_access: int = 0,
        serial: int = 0,
        marks: tuple[RunMark, ...] = (),
    ) -> None:
        self.parent = parent
        self.elements = elements
        self.slots = slots
        self.start = start
        self.namespace = namespace
        self.last_access = last_access
        self.serial = serial
        self.children: dict[Hashable, TreeNode] = {}
        self.lock_ref = 0
        self.hits = 0
        self.queued = False
        self.marks = marks
        self.block_hashes = NO_HASHES

    def first_part(self, length: int, *, serial: int) -> TreeNode:
        """Return a node of the first `length` elements, in the same state and without
        children. Its parent does not know it yet."""
        part = TreeNode(
            parent=self.parent,
            elements=self.elements[:length],
            slots=self.slots[:length],
            start=self.start,
            namespace=self.namespace,
            last_access=self.last_access,
            serial=serial,
            marks=tuple(mark.copy() for mark in self.marks),
        )
        part.lock_ref = self.lock_ref
        part.hits = self.hits
        return part

    @property
    def end(self) -> int:
        """Position after the last element."""
        return self.start + len(self.slots)

    def __repr__(self) -> str:
        return (
            f"TreeNode(#{self.serial} [{self.start}, {self.end}) "
            f"namespace={self.namespace!r} lock_ref={self.lock_ref} "
            f"children={len(self.children)})"
        )
