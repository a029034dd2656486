"""N-gram drafts on the host: the history of tokens and the trees, against plain models
that search everything.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.speculative.ngram.history import NO_TOKEN, NONE, SIZES, TokenHistory
from sglang.srt.speculative.ngram.trees import KEEP, build_trees, path_weights
from sglang.srt.utils.salt_chain import FIRST_CONTENT_ID
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=4, suite="cpu", full_time=30)

MAX_MATCH, MAX_DRAFT, COUNT = 6, 5, 4
EXAMPLES = count(ci=40, full=1000)

# Which stream gets which tokens; a stream's namespace is its number modulo 2.
APPENDS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=9)),
    min_size=1,
    max_size=12,
)


class Writing:
    """A history, and the same tokens as plain lists by place."""

    def __init__(self, capacity: int) -> None:
        self.history = TokenHistory(
            capacity=capacity, max_match=MAX_MATCH, max_draft=MAX_DRAFT
        )
        self.words: dict[int, tuple[int, int]] = {}
        self.streams: dict[int, object] = {}

    def append(self, stream: int, tokens: list[int]) -> None:
        extent = self.streams.get(stream)
        if extent is None or extent.room < len(tokens):
            extent = self.streams[stream] = self.history.reserve(24)
            for place in range(extent.begin, extent.limit):
                self.words.pop(place, None)
        first = extent.end
        self.history.append([extent], [np.array(tokens, np.int64)], [stream % 2])
        for i, token in enumerate(tokens):
            self.words[first + i] = (token, stream % 2)

    def match_len(self, end: int, place: int) -> int:
        length = 0
        while length < MAX_MATCH:
            own = self.words.get(end - length)
            if own is None or self.words.get(place - length) != own:
                break
            length += 1
        return length

    def follow(self, end: int, place: int) -> list[int]:
        """The tokens after a match; after the stream's end, the match repeats."""
        found, at = [], place + 1
        for _ in range(MAX_DRAFT):
            word = self.words.get(at)
            if word is None or word[1] != self.words[end][1]:
                break
            found.append(word[0])
            at = place + 1 if at == end else at + 1
        return found


def check_matches(writing: Writing, end: int) -> None:
    ends = np.array([end])
    found = writing.history.matches(ends, count=COUNT)
    drafts = writing.history.continuations(ends, found, length=MAX_DRAFT)
    places, lens = found.places[0].tolist(), found.lens[0].tolist()
    real = [place for place in places if place != NONE]
    assert len(set(real)) == len(real) and end not in real
    assert lens == sorted(lens, reverse=True)
    for place, length, draft in zip(places, lens, drafts[0].tolist(), strict=True):
        assert (place == NONE) == (length == 0)
        due = [] if place == NONE else writing.follow(end, place)
        if place != NONE:
            assert length == writing.match_len(end, place)
        assert draft == due + [NO_TOKEN] * (MAX_DRAFT - len(due))
    longest = max(
        (writing.match_len(end, p) for p in writing.words if p != end), default=0
    )
    # An n-gram that occurred is found by its newest place.
    assert lens[0] >= max((size for size in SIZES if size <= longest), default=0)


@settings(max_examples=EXAMPLES, deadline=None)
@given(APPENDS, st.sampled_from([64, 2000]))
def test_matches_are_true_and_the_longest_are_found(appends, capacity):
    writing = Writing(capacity)
    for stream, tokens in appends:
        writing.append(stream, tokens)
        extent = writing.streams[stream]
        is_alive = bool(tokens) and extent.end - 1 in writing.words
        if is_alive and capacity == 2000:
            check_matches(writing, extent.end - 1)
        elif is_alive:
            # Chains were overwritten: hints may be lost, but nothing is made up.
            ends = np.array([extent.end - 1])
            found = writing.history.matches(ends, count=COUNT)
            places, lens = (part[0].tolist() for part in found)
            for place, length in zip(places, lens, strict=True):
                if length:
                    assert length == writing.match_len(extent.end - 1, place)


def test_streams_of_another_namespace_never_match():
    writing = Writing(2000)
    writing.append(0, [1, 2, 3, 1, 2])
    writing.append(1, [1, 2, 3, 1, 2])
    extent = writing.streams[1]
    found = writing.history.matches(np.array([extent.end - 1]), count=COUNT)
    real = [place for place in found.places[0].tolist() if place != NONE]
    assert real and all(place >= extent.begin for place in real)


def test_embeddings_are_never_drafted():
    """Their ids are wider than a token, and would reach into the namespace's tag."""
    history = TokenHistory(capacity=64, max_match=MAX_MATCH, max_draft=MAX_DRAFT)
    extent = history.reserve(8)
    embeddings = np.array([FIRST_CONTENT_ID, (1 << 61) - 1])
    tokens = np.concatenate([[5, 6], embeddings, [5, 6]])
    history.append([extent], [tokens], [1])
    ends = np.array([extent.end - 1])
    found = history.matches(ends, count=COUNT)
    assert found.lens[0].tolist() == [2] + [0] * (COUNT - 1)
    drafts = history.continuations(ends, found, length=MAX_DRAFT)
    assert (drafts == NO_TOKEN).all()


def test_appending_at_once_is_appending_one_by_one():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 5, 300)
    whole, single = (
        TokenHistory(capacity=1024, max_match=MAX_MATCH, max_draft=MAX_DRAFT)
        for _ in range(2)
    )
    extents = [history.reserve(400) for history in (whole, single)]
    whole.append([extents[0]], [tokens], [0])
    for token in tokens:
        single.append([extents[1]], [np.array([token])], [0])
    ends = np.arange(extents[0].begin, extents[0].end)
    for one, two in zip(
        whole.matches(ends, count=8), single.matches(ends, count=8), strict=True
    ):
        assert np.array_equal(one, two)


# -- trees -----------------------------------------------------------------------------

SHAPES = [
    TreeShape(topk=1, num_steps=4, num_draft_tokens=5),
    TreeShape(topk=2, num_steps=4, num_draft_tokens=6),
    TreeShape(topk=3, num_steps=2, num_draft_tokens=12),
    TreeShape(topk=4, num_steps=6, num_draft_tokens=10),
]


def paths_for(shape: TreeShape) -> st.SearchStrategy[list[list[int]]]:
    path = st.lists(st.integers(0, 2), max_size=shape.num_steps)
    return st.lists(path, min_size=shape.topk, max_size=shape.topk)


def best_nodes(
    paths: list[list[int]],
    weights: list[float],
    shape: TreeShape,
    *,
    counts_paths: bool,
) -> set[tuple[int, ...]]:
    """The nodes of the tree as token paths, by a search of all prefixes."""
    scores: dict[tuple[int, ...], float] = {}
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    order: dict[tuple[int, ...], tuple[int, int]] = {}
    for i, (path, weight) in enumerate(zip(paths, weights, strict=True)):
        for depth in range(len(path)):
            node, score = tuple(path[: depth + 1]), weight * KEEP**depth
            siblings = children.setdefault(node[:-1], [])
            if node not in siblings:
                siblings.append(node)
                order[node] = (depth, i)
                scores[node] = 0.0
            scores[node] = (
                scores[node] + score if counts_paths else max(scores[node], score)
            )
    kept = {(): True}
    for node in sorted(order, key=len):
        is_near = children[node[:-1]].index(node) < shape.topk
        kept[node] = is_near and kept[node[:-1]] and scores[node] > 0
    ranked = sorted(
        (node for node in order if kept[node]),
        key=lambda node: (-round(scores[node], 9), order[node]),
    )
    return set(ranked[: shape.num_draft_tokens - 1])


@pytest.mark.parametrize("counts_paths", [False, True], ids=["BFS", "PROB"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(st.data())
def test_trees(shape, counts_paths, data):
    rows = data.draw(st.lists(paths_for(shape), min_size=1, max_size=3))
    padded = np.full((len(rows), shape.topk, shape.num_steps), NO_TOKEN)
    for row, paths in enumerate(rows):
        for i, path in enumerate(paths):
            padded[row, i, : len(path)] = path
    lens = np.array([[max(9 - i, 1) for i in range(shape.topk)]] * len(rows))
    lens = np.where((padded != NO_TOKEN).any(axis=2), lens, 0)
    weights = path_weights(lens, longest=18)
    trees = build_trees(padded, weights, shape=shape, counts_paths=counts_paths)
    for row, paths in enumerate(rows):
        tokens, parents = trees.tokens[row].tolist(), trees.parents[row].tolist()
        nodes: list[tuple[int, ...]] = [()]
        for place in range(1, shape.num_draft_tokens):
            assert 0 <= parents[place] < place
            nodes.append((*nodes[parents[place]], tokens[place]))
        assert len(set(nodes)) == len(nodes)
        count = int(trees.counts[row])
        if shape.topk == 1:
            assert nodes[count] == tuple(paths[0])
        else:
            due = best_nodes(
                paths, weights[row].tolist(), shape, counts_paths=counts_paths
            )
            assert set(nodes[1 : count + 1]) == due
        check_links(trees, row, parents, nodes, shape)


def check_links(trees, row, parents, nodes, shape) -> None:
    count = len(nodes)
    assert trees.depths[row].tolist() == [len(node) for node in nodes]
    assert max(len(node) for node in nodes) <= shape.num_steps
    for place in range(count):
        ancestors, at = {place}, place
        while at:
            at = parents[at]
            ancestors.add(at)
        assert set(np.flatnonzero(trees.mask[row, place])) == ancestors
        family = [i for i in range(1, count) if parents[i] == place]
        assert trees.children[row, place] == (family[0] if family else NO_TOKEN)
        for one, two in pairwise([*family, NO_TOKEN]):
            assert trees.siblings[row, one] == two


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
