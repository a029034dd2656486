"""Merges continuations of matches into draft trees, on the host, for all rows at once.

A path is one continuation. Paths of a row that begin alike share nodes: node (path i,
depth d) belongs to the first path that has the same d + 1 tokens. Nodes are scored, and
the best D - 1 become the tree, whose layout is the one of `DraftTree`. Where there are
fewer, chains of made-up tokens behind the root fill the tree up: every node must have a
parent, and siblings must differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.speculative.ngram.history import NO_TOKEN

if TYPE_CHECKING:
    import numpy.typing as npt

    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.mem_cache.page_ledger import IntArray

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

# Share of drafted tokens that are right, once those before them are.
KEEP = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrees:
    """R trees of D nodes on the host, root first, parents before children.

    Fields, int64 [R, D] unless said:
        tokens: of the drafts; the root's entry is 0.
        depths: distance from the root.
        parents: place of the parent within the tree; -1 for the root and padding.
        children, siblings: as `next_token` and `next_sibling` of `DraftTree`.
        mask: bool [R, D, D], as in `DraftTree`.
        counts: [R], nodes that are drafts.
    """

    tokens: IntArray
    depths: IntArray
    parents: IntArray
    children: IntArray
    siblings: IntArray
    mask: Bools
    counts: IntArray


def path_weights(lens: IntArray, *, longest: int) -> Floats:
    """Return the weight of each match by its length, [R, C]: 0 without a match, and
    close to 1 for matches of `longest` tokens."""
    return np.where(lens > 0, 1.0 - 0.5 ** np.minimum(lens, longest), 0.0)


def build_trees(
    paths: IntArray, weights: Floats, *, shape: TreeShape, counts_paths: bool
) -> HostTrees:
    """Build the trees of R rows.

    Args:
        paths: int64 [R, C, S], tokens of C continuations, NO_TOKEN after their ends;
            the best first.
        weights: [R, C], of the continuations.
        counts_paths: whether a node's score is the sum over the paths through it (what
            occurred often) instead of the greatest (what occurred last, in the best
            match).
    """
    if shape.topk == 1:
        return _chains(paths[:, 0], shape)
    rows, count, steps = paths.shape
    first = _first_alike(paths)
    is_node = (paths != NO_TOKEN) & (first == np.arange(count)[None, :, None])
    scores = _scores(paths, weights, first, counts_paths=counts_paths)
    is_node &= _within_breadth(paths, first, is_node, shape.topk)
    # A node without its parent cannot be reached.
    is_node &= _parents_kept(is_node, first)
    return _select(paths, first, is_node, scores, shape)


def _first_alike(paths: IntArray) -> IntArray:
    """Return for each node (i, d) the first path that has the same d + 1 tokens."""
    is_equal = paths[:, :, None, :] == paths[:, None, :, :]
    alike = np.logical_and.accumulate(is_equal, axis=3)
    first: IntArray = alike.argmax(axis=2)
    return first


def _scores(
    paths: IntArray, weights: Floats, first: IntArray, *, counts_paths: bool
) -> Floats:
    """Return the score of each first node, [R, C, S], at most its parent's."""
    rows, count, steps = paths.shape
    decay = KEEP ** np.arange(steps)
    if not counts_paths:
        return weights[:, :, None] * decay
    scores = np.zeros((rows, count, steps))
    row = np.arange(rows)[:, None, None]
    depth = np.arange(steps)
    given = np.where(paths != NO_TOKEN, weights[:, :, None] * decay, 0.0)
    np.add.at(scores, (row, first, depth), given)
    return scores


def _within_breadth(
    paths: IntArray, first: IntArray, is_node: Bools, breadth: int
) -> Bools:
    """Return which nodes are among the first `breadth` children of their parent."""
    count = paths.shape[1]
    parents = np.concatenate((np.zeros_like(first[:, :, :1]), first[:, :, :-1]), axis=2)
    is_sibling = parents[:, :, None, :] == parents[:, None, :, :]
    is_elder = np.tri(count, k=-1, dtype=bool)[:, :, None] & is_node[:, None, :, :]
    elders: IntArray = (is_sibling & is_elder).sum(axis=2)
    return elders < breadth


def _parents_kept(is_node: Bools, first: IntArray) -> Bools:
    """Return which nodes have all ancestors in `is_node`."""
    # What the first path alike has at this depth.
    kept = np.take_along_axis(is_node, first, axis=1)
    kept_all: Bools = np.logical_and.accumulate(kept, axis=2)
    return kept_all


def _select(
    paths: IntArray,
    first: IntArray,
    is_node: Bools,
    scores: Floats,
    shape: TreeShape,
) -> HostTrees:
    """Take the best D - 1 nodes and link them."""
    rows, count, steps = paths.shape
    nodes = shape.num_draft_tokens
    # By depth, then by path, so that parents precede children.
    by_depth = np.where(is_node, scores, -1.0).transpose(0, 2, 1).reshape(rows, -1)
    best = np.argsort(-by_depth, axis=1, kind="stable")[:, : nodes - 1]
    best.sort(axis=1)
    row = np.arange(rows)[:, None]
    is_real = by_depth[row, best] > 0
    # Padding comes last.
    order = np.argsort(~is_real, axis=1, kind="stable")
    best, is_real = best[row, order], is_real[row, order]
    width = best.shape[1]
    depth, path = best // count, best % count
    counts: IntArray = is_real.sum(axis=1)
    tokens, depths, mask = _filling(counts, shape)
    drafted = slice(1, width + 1)
    given = np.where(is_real, paths[row, path, depth], NO_TOKEN)
    first_level = np.where(depth == 0, given, NO_TOKEN)
    tokens[:, 1:] = np.take_along_axis(_unused(first_level, nodes), tokens[:, 1:], 1)
    tokens[:, drafted] = np.where(is_real, given, tokens[:, drafted])
    depths[:, drafted] = np.where(is_real, depth + 1, depths[:, drafted])
    # Node a is above node c if c's path is alike with a's down to a's depth.
    alike = first[row[:, :, None], path[:, :, None], depth[:, None, :]]
    is_above = (alike == path[:, None, :]) & (depth[:, None, :] < depth[:, :, None])
    is_above &= is_real[:, :, None] & is_real[:, None, :]
    mask[:, drafted, drafted] |= is_above
    return _linked(tokens, depths, mask, counts)


def _filling(counts: IntArray, shape: TreeShape) -> tuple[IntArray, IntArray, Bools]:
    """Return tokens, depths and masks of trees whose nodes after the first `counts`
    drafts are chains of S nodes behind the root. Their tokens are 0, 1, and so on;
    drafts have none, and see the root and themselves."""
    nodes, steps = shape.num_draft_tokens, shape.num_steps
    place = np.arange(nodes)
    filler = place - 1 - counts[:, None]
    is_filler = (filler >= 0) & (place > 0)
    depths = np.where(is_filler, filler % steps + 1, 0)
    chain = np.where(is_filler, filler // steps, -1 - place)
    is_same = chain[:, :, None] == chain[:, None, :]
    mask = is_same & np.tri(nodes, dtype=bool)
    mask[:, :, 0] = True
    return np.where(is_filler, filler, 0), depths, mask


def _unused(tokens: IntArray, count: int) -> IntArray:
    """Return the `count` smallest token ids that a row does not contain."""
    rows, width = tokens.shape
    is_used = np.zeros((rows, count + width), bool)
    row = np.nonzero((tokens >= 0) & (tokens < count + width))
    is_used[row[0], tokens[row]] = True
    unused: IntArray = np.argsort(is_used, axis=1, kind="stable")[:, :count]
    return unused


def _chains(paths: IntArray, shape: TreeShape) -> HostTrees:
    """Return the chains of the best continuations. A chain has all its nodes, because
    it is verified without a mask; those after its tokens are token 0."""
    rows, nodes = len(paths), shape.num_draft_tokens
    tokens = _filled(rows, nodes, 0)
    tokens[:, 1:] = np.where(paths == NO_TOKEN, 0, paths)
    depths = np.tile(np.arange(nodes), (rows, 1))
    mask = np.tile(np.tri(nodes, dtype=bool), (rows, 1, 1))
    return _linked(tokens, depths, mask, (paths != NO_TOKEN).sum(axis=1))


def _linked(
    tokens: IntArray, depths: IntArray, mask: Bools, counts: IntArray
) -> HostTrees:
    """Link nodes by their masks."""
    nodes = tokens.shape[1]
    # The parent is the only ancestor one level up.
    is_parent = mask & (depths[:, None, :] == depths[:, :, None] - 1)
    parents = np.where(is_parent.any(axis=2), is_parent.argmax(axis=2), NO_TOKEN)
    is_child = is_parent.transpose(0, 2, 1)
    children = np.where(is_child.any(axis=2), is_child.argmax(axis=2), NO_TOKEN)
    is_later = np.tri(nodes, k=-1, dtype=bool).T
    is_sibling = (parents[:, :, None] == parents[:, None, :]) & is_later
    is_sibling &= (parents >= 0)[:, :, None]
    siblings = np.where(is_sibling.any(axis=2), is_sibling.argmax(axis=2), NO_TOKEN)
    return HostTrees(
        tokens=tokens,
        depths=depths,
        parents=parents,
        children=children,
        siblings=siblings,
        mask=mask,
        counts=counts,
    )


def _filled(rows: int, nodes: int, value: int) -> IntArray:
    return np.full((rows, nodes), value, np.int64)
