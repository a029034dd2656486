"""The map of pages and the table of the prefix tree, against a model page by page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import invariant
from numpy.typing import NDArray
from request_world import RequestMachine, admit, make_cache

from sglang.srt.mem_cache.common import extend_rows, release_req
from sglang.srt.mem_cache.groups.window_slots import WindowSlots
from sglang.srt.mem_cache.page_map import PageState, page_cells
from sglang.srt.mem_cache.tree_table import TreeColumn, tree_table
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=4, suite="cpu")

Cell = tuple[str, int]


def cells_of(cells: NDArray[np.int32]) -> list[Cell]:
    """(state, holder) of each cell."""
    return [(PageState(c & 7).name, c >> 4) for c in cells.tolist()]


class MapMachine(RequestMachine):
    """After every step the map of all pages is that of a walk from page to page."""

    def expected(self, page: int) -> Cell:
        size = self.cache.page_size
        if page in self.quarantine.pages.tolist():
            return "QUARANTINED", 0
        for req in self.requests:
            pages = self.row_pages(req)
            if page in pages[req.cache_protected_len :]:
                first = pages.index(page)
                is_used = first < req.committed_len
                return ("RUNNING" if is_used else "DRAFT"), req.serial
        for node in self.cache.iter_nodes():
            if page in (node.slots // size).tolist():
                return ("LOCKED" if node.lock_ref else "CACHED"), -node.serial
        return "FREE", 0

    @invariant()
    def the_map_shows_every_holder(self) -> None:
        cells = page_cells(
            self.cache,
            self.requests,
            has_drafts=True,
            set_aside=self.quarantine.pages,
        )
        num_pages = self.cache.allocator.num_pages
        expected = [self.expected(page) for page in range(1, num_pages + 1)]
        assert cells_of(cells) == expected
        free = sum(state == "FREE" for state, _ in expected)
        assert free == self.cache.allocator.num_free_pages

    @invariant()
    def the_table_shows_every_run(self) -> None:
        table, total = tree_table(self.cache, max_rows=1000)
        nodes = {node.serial: node for node in self.cache.iter_nodes()}
        assert total == len(nodes) == len(table)
        seen: set[int] = {0}
        for row in table.tolist():
            node = nodes[row[TreeColumn.SERIAL]]
            assert row[TreeColumn.PARENT] in seen
            assert node.parent is not None
            assert row[TreeColumn.PARENT] == node.parent.serial
            assert row[TreeColumn.START] == node.start
            assert row[TreeColumn.LENGTH] == len(node.slots)
            assert row[TreeColumn.LOCKS] == node.lock_ref <= row[TreeColumn.HITS]
            seen.add(node.serial)


TestMap = MapMachine.TestCase
TestMap.settings = settings(
    max_examples=count(ci=10, full=300),
    stateful_step_count=25,
    deadline=None,
    phases=[Phase.generate],
)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_page_that_nobody_is_known_to_hold_is_unknown(page_size: int) -> None:
    cache = make_cache(pages=6, page_size=page_size)
    assert cache.allocator.alloc_pages(2) is not None
    none = np.empty(0, dtype=np.int64)
    poisoned = np.array([True, False, True, False, False, False])
    cells = page_cells(
        cache, [], has_drafts=False, set_aside=none, is_poisoned=poisoned
    )
    states = [state for state, _ in cells_of(cells)]
    # A record of an earlier owner says nothing about a page that has one.
    assert states == ["UNKNOWN"] * 2 + ["POISONED"] + ["FREE"] * 3


def test_pages_with_window_slots_are_marked() -> None:
    swa = WindowSlots(
        num_pages=8, num_window_pages=8, page_size=2, window=2, slack=2, device="cpu"
    )
    cache = make_cache(pages=8, page_size=2, secondary=[swa])
    req = admit(cache, list(range(9)))
    slots = extend_rows(cache, rows=[req.req_pool_idx], prefix_lens=[0], seq_lens=[8])
    assert slots is not None
    req.committed_len = req.allocated_len = 8
    swa.drop(np.array([1, 2]))
    none = np.empty(0, dtype=np.int64)
    cells = page_cells(cache, [req], has_drafts=True, set_aside=none)
    assert [bool(c & 8) for c in cells.tolist()] == [False] * 2 + [True] * 2 + [
        False
    ] * 4
    # The mark changes neither state nor holder.
    assert cells_of(cells)[:4] == [("RUNNING", req.serial)] * 4


def test_of_too_many_runs_the_largest_are_shown_with_all_before_them() -> None:
    cache = make_cache(pages=80, page_size=1)
    # Runs of 12, 4 and 1 tokens, each with branches, the last with long ones.
    for prefix, branches, length in (([1] * 12, 3, 1), ([2] * 4, 2, 1), ([3], 2, 16)):
        for branch in range(branches):
            req = admit(cache, [*prefix, *[10 + branch] * length, 99])
            end = len(prefix) + length
            start = req.committed_len
            extend_rows(
                cache, rows=[req.req_pool_idx], prefix_lens=[start], seq_lens=[end]
            )
            req.committed_len = req.allocated_len = end
            release_req(req, cache=cache)
    table, total = tree_table(cache, max_rows=100)
    assert total == len(table) == 3 + 7
    for rows in range(1, total + 1):
        shown, all_of_them = tree_table(cache, max_rows=rows)
        assert (len(shown), all_of_them) == (rows, total)
        serials = [0, *shown[:, TreeColumn.SERIAL].tolist()]
        for place, parent in enumerate(shown[:, TreeColumn.PARENT].tolist()):
            assert parent in serials[: place + 1]
    lengths = tree_table(cache, max_rows=3)[0][:, TreeColumn.LENGTH].tolist()
    assert sorted(lengths) == [1, 16, 16]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
