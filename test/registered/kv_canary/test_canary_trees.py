"""Trees of draft tokens: lineages of ancestors, columns, aliases and roots; on every
implementation that runs here."""

from __future__ import annotations

import dataclasses

import pytest
from canary_world import (
    LENS,
    Backend,
    World,
    each_backend,
    entries,
    findings,
    long,
    small_world,
)

from kv_canary.checks import Reason
from kv_canary.layout import (
    FingerprintMode,
)
from kv_canary.records import Counter, Ring, WriterKind
from kv_canary.view import ForwardView
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=15, suite="cuda")


@each_backend
def test_tree_nodes_have_their_ancestors_lineage(backend: Backend) -> None:
    w = small_world()
    w.lens = [5, 0, 20]
    rows = w.rows(extends=[4, 0, 2])
    #  0 - 1 - 3     4 - 5
    #   \- 2
    rows = dataclasses.replace(
        rows,
        parent_index=long([-1, 0, 0, 1, -1, 4]),
        positions=long([5, 6, 6, 7, 20, 21]),
        max_depth=4,
    )
    w.state.expected_lineage[1] = w.lineage(0, 5)
    w.write(backend, w.state, rows, WriterKind.VERIFY)
    assert findings(w.state) == []
    lineages = [int(w.state.tail[int(s), 1]) for s in rows.out_cache_loc]
    chain = dataclasses.replace(rows, parent_index=None)
    for path, node in (((0, 1, 3), 3), ((0, 2), 2), ((0,), 0)):
        picked = long(list(path))
        one = ForwardView(
            req_rows=chain.req_rows[:1],
            prefix_lens=chain.prefix_lens[:1],
            extend_lens=long([len(path)]),
            qo_indptr=long([0, len(path)]),
            input_ids=rows.input_ids[picked],
            positions=rows.positions[picked],
            out_cache_loc=rows.out_cache_loc[picked],
            serials=rows.serials[:1],
            salts=rows.salts[:1],
        )
        w.state.expected_lineage[1] = w.lineage(0, 5)
        w.advance(backend, w.state, one)
        assert int(w.state.expected_lineage[1]) == lineages[node]


def tree(w: World) -> ForwardView:
    """Two children of a root, and a child of each, both with one token.

    0 - 1 - 3
     +- 2 - 4
    """
    w.lens = [5, 0, 0]
    w.state.expected_lineage[1] = w.lineage(0, 5)
    rows = w.rows(extends=[5, 0, 0])
    rows.input_ids[4] = rows.input_ids[3]
    return dataclasses.replace(
        rows,
        parent_index=long([-1, 0, 0, 1, 2]),
        positions=long([5, 6, 6, 7, 7]),
        max_depth=2,
    )


@each_backend
def test_nodes_are_in_their_columns(backend: Backend) -> None:
    """A node in a slot of the row's own prefix, and one in a slot of no column."""
    for slot in (2, 50):
        w = small_world()
        rows = tree(w)
        rows.out_cache_loc[2] = w.slot(0, slot)
        w.write(backend, w.state, rows, WriterKind.VERIFY)
        due = (Reason.WRITE_FOREIGN, 1, w.slot(0, slot), 6)
        assert findings(w.state) == [due]
        (entry,) = entries(w.state)
        assert entry[Ring.EXPECTED_SLOT] == w.slot(0, 7)


@each_backend
def test_cousins_in_one_slot(backend: Backend) -> None:
    """Alike in token, position and writer: only their histories differ."""
    w = small_world()
    rows = tree(w)
    w.req_to_token[1, 9] = w.slot(0, 8)
    rows.out_cache_loc[4] = w.slot(0, 8)
    w.write(backend, w.state, rows, WriterKind.VERIFY)
    assert findings(w.state) == [(Reason.WRITE_ALIAS, 1, w.slot(0, 8), 7)]


@each_backend
def test_a_deep_tree_has_the_lineages_of_its_path(backend: Backend) -> None:
    w = small_world()
    w.lens = [5, 0, 0]
    w.state.expected_lineage[1] = w.lineage(0, 5)
    path = w.rows(extends=[45, 0, 0])
    parents = long([-1, *range(44)])
    deep = dataclasses.replace(path, parent_index=parents, max_depth=44)
    w.write(backend, w.state, deep, WriterKind.VERIFY)
    slots = path.out_cache_loc
    assert w.state.tail[slots, 1].tolist() == [w.lineage(0, n) for n in range(6, 51)]
    assert findings(w.state) == []


@each_backend
def test_of_a_tree_the_root_was_published(backend: Backend) -> None:
    w = small_world()
    rows = tree(w)
    rows.input_ids[[0, 3]] += 1
    w.write(backend, w.state, rows, WriterKind.VERIFY, published=w.published())
    assert findings(w.state) == [(Reason.WRITE_TOKEN, 1, w.slot(0, 5), 5)]


@each_backend
def test_a_rotation_looks_ahead_over_a_tree(backend: Backend) -> None:
    """As far as its longest path, of which any number may be accepted."""
    w = small_world(mode=FingerprintMode.ROTATE, period=12)
    rows = w.rows(extends=[4, 1, 1])
    rows = dataclasses.replace(
        rows,
        parent_index=long([-1, 0, 0, 0, -1, -1]),
        positions=long([11, 12, 12, 12, 6, 20]),
        max_depth=1,
    )
    w.verify(backend, w.state, rows, w.table(rows))
    due = {
        i: [p for p in range(n) if -(w.slot(i, p) + n) % 12 < (2 if i == 0 else 1)]
        for i, n in enumerate(LENS)
    }
    assert findings(w.state) == []
    expected = sum(map(len, due.values()))
    assert int(w.state.counters[Counter.REHASHED_SLOTS]) == expected > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
