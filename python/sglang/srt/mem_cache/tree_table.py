"""The prefix tree as a table of numbers, for people who inspect it."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sglang.srt.mem_cache.page_map import SERIAL_MASK

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.tree_node import TreeNode


class TreeColumn(IntEnum):
    """Columns of the table.

    SERIAL and PARENT, the preceding run (0 at position 0), are modulo 2^27. LOCKS
    counts requests that rely on the run now, HITS all that ever did. IDLE counts
    accesses of the tree since the run was used.
    """

    SERIAL = 0
    PARENT = 1
    START = 2
    LENGTH = 3
    LOCKS = 4
    HITS = 5
    IDLE = 6


def tree_table(
    cache: BasePrefixCache, *, max_rows: int
) -> tuple[NDArray[np.int32], int]:
    """Return (int32 [rows, len(TreeColumn)], number of runs in the cache).

    Parents come before children. With more than `max_rows` runs, only those with the
    most cached tokens in and below them are listed, so that every row's parent is
    there.
    """
    nodes = list(cache.iter_nodes())
    shown = nodes if len(nodes) <= max_rows else _largest(nodes, max_rows)
    newest = max((node.last_access for node in nodes), default=0)
    rows = [
        (
            node.serial & SERIAL_MASK,
            0 if node.parent is None else node.parent.serial & SERIAL_MASK,
            node.start,
            len(node.slots),
            node.lock_ref,
            node.hits,
            newest - node.last_access,
        )
        for node in shown
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(TreeColumn))
    return np.minimum(table, np.iinfo(np.int32).max).astype(np.int32), len(nodes)


def _largest(nodes: list[TreeNode], count: int) -> list[TreeNode]:
    """Return the `count` nodes with the most tokens in and below them, in tree
    order."""
    sizes = {id(node): len(node.slots) for node in nodes}
    for node in reversed(nodes):
        if id(node.parent) in sizes:
            sizes[id(node.parent)] += sizes[id(node)]
    places = {id(node): place for place, node in enumerate(nodes)}
    # A parent is larger than its children and comes before them.
    ranked = sorted(nodes, key=lambda node: (-sizes[id(node)], places[id(node)]))
    return sorted(ranked[:count], key=lambda node: places[id(node)])
