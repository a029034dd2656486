"""Faults of draft trees: masks, positions and parents, between builder and target."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from sglang.faults.steps.site import Fault, FaultSite
    from sglang.srt.draft_trees.buffers import DraftTree

# Changes the tree of a row; returns whether it could.
Change: TypeAlias = "Callable[[FaultSite, DraftTree, int], bool]"


def in_tree(change: Change) -> Callable[[FaultSite], None]:
    """Return a planter that changes one request's tree after it was built."""

    def plant(site: FaultSite) -> None:
        draft_worker = site.worker.draft_worker

        def draft(original: Fault, bs: int, **options: Any) -> None:
            original(bs, **options)
            tree = draft_worker.workspace.rows(bs).tree
            for row in site.candidates():
                if change(site, tree, row):
                    site.harm(row)
                    break

        site.wrap(draft_worker, "draft", draft)

    return plant


def lose_ancestor(site: FaultSite, tree: DraftTree, row: int) -> bool:
    """Hide a node's parent from it."""
    parents = _parents(tree, row)
    node = site.rng.choice([i for i, parent in enumerate(parents) if parent >= 0])
    tree.mask[row, node, parents[node]] = False
    return True


def see_sibling(site: FaultSite, tree: DraftTree, row: int) -> bool:
    """Make a node attend to a non-ancestor."""
    others = torch.nonzero(~tree.mask[row, 1:]).tolist()
    node, other = site.rng.choice(others)
    tree.mask[row, node + 1, other] = True
    return True


def see_all(site: FaultSite, tree: DraftTree, row: int) -> bool:
    """Make every node attend to every node."""
    tree.mask[row] = True
    return True


def number_positions(site: FaultSite, tree: DraftTree, row: int) -> bool:
    """Number positions by node instead of by depth."""
    before = tree.positions[row].clone()
    tree.positions[row] = before[0] + torch.arange(len(before), device=before.device)
    return not torch.equal(before, tree.positions[row])


def advance_positions(site: FaultSite, tree: DraftTree, row: int) -> bool:
    """Make every position one too large."""
    tree.positions[row] += 1
    return True


def borrow_parent(site: FaultSite, tree: DraftTree, row: int) -> bool:
    """Give a node a parent in another request's tree."""
    rows, nodes = tree.tokens.shape
    if rows < 2:
        return False
    node = site.rng.choice(_inner(tree, row))
    other = site.rng.choice([i for i in range(rows) if i != row])
    tree.parent_index[row, node] = other * nodes + site.rng.randrange(nodes)
    return True


def follow_later(site: FaultSite, tree: DraftTree, row: int) -> bool:
    """Give a node a later leaf as its parent."""
    parents, nodes = _parents(tree, row), tree.tokens.shape[1]
    leaves = [i for i in range(1, nodes) if i not in parents]
    found = [(i, leaf) for i in _inner(tree, row) for leaf in leaves if leaf > i]
    found = [(i, leaf) for i, leaf in found if not bool(tree.mask[row, leaf, i])]
    if not found:
        return False
    node, leaf = site.rng.choice(found)
    tree.parent_index[row, node] = row * nodes + leaf
    return True


def _parents(tree: DraftTree, row: int) -> list[int]:
    """Places of the parents within the request, or -1."""
    first = row * tree.tokens.shape[1]
    places: list[int] = tree.parent_index[row].tolist()
    return [place - first if place >= 0 else -1 for place in places]


def _inner(tree: DraftTree, row: int) -> list[int]:
    """The nodes after the root that have a parent."""
    return [i for i, parent in enumerate(_parents(tree, row)) if parent >= 0]
