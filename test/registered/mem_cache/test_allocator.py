"""Both allocators against a model of sets, and their refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang.srt.mem_cache.allocator import (
    BaseAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    create_allocator,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=12, suite="cpu")

NO_LOCS = torch.zeros(1, dtype=torch.int64)


def pages_for(length: int, page_size: int) -> int:
    return -(-length // page_size)


class AllocatorMachine(RuleBasedStateMachine):
    """Requests grow, shrink by pages and end; a dict of lists is the truth."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 16]),
        pages=st.integers(3, 24),
        force_paged=st.booleans(),
    )
    def build(self, page_size: int, pages: int, force_paged: bool) -> None:
        self.page_size = page_size
        self.num_pages = pages
        size = pages * page_size
        self.allocator: BaseAllocator = (
            PagedTokenToKVPoolAllocator(size=size, page_size=page_size)
            if force_paged
            else create_allocator(size=size, page_size=page_size)
        )
        self.requests: dict[int, list[int]] = {}
        self.serial = 0
        self.freed: list[int] = []
        self.expected_freed: list[int] = []
        self.allocator.register_on_free(lambda slots: self.freed.extend(slots.tolist()))
        self.pending_pages = 0

    def held_pages(self) -> int:
        return sum(pages_for(len(s), self.page_size) for s in self.requests.values())

    def expect_free(self, slots: list[int]) -> None:
        pages = sorted({slot // self.page_size for slot in slots})
        for page in pages:
            first = page * self.page_size
            self.expected_freed.extend(range(first, first + self.page_size))

    @rule(amounts=st.lists(st.integers(0, 40), min_size=1, max_size=5), data=st.data())
    def extend(self, amounts: list[int], data: st.DataObject) -> None:
        ids = list(self.requests)
        rows: list[int] = []
        for _ in amounts:
            reuse = [i for i in ids if i not in rows]
            if reuse and data.draw(st.booleans()):
                rows.append(data.draw(st.sampled_from(reuse)))
            else:
                self.serial += 1
                rows.append(self.serial)
        self.grow(rows, amounts)

    @precondition(lambda self: bool(self.requests))
    @rule(steps=st.integers(1, 6))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            rows = list(self.requests)
            self.grow(rows, [1] * len(rows))

    def grow(self, rows: list[int], amounts: list[int]) -> None:
        held = [self.requests.get(row, []) for row in rows]
        prefix = [len(slots) for slots in held]
        seq = [p + a for p, a in zip(prefix, amounts, strict=True)]
        last = torch.tensor([slots[-1] if slots else -7 for slots in held])
        need = sum(
            pages_for(s, self.page_size) - pages_for(p, self.page_size)
            for p, s in zip(prefix, seq, strict=True)
        )
        before = self.allocator.num_free_pages
        cost = self.allocator.extend_cost(prefix, seq)
        assert cost == need * self.page_size
        slots = self.allocator.alloc_extend(
            prefix_lens=prefix, seq_lens=seq, last_locs=last
        )
        if need > before:
            assert slots is None
            assert self.allocator.num_free_pages == before
            return
        assert slots is not None and slots.dtype == torch.int64
        flat = slots.tolist()
        assert len(flat) == sum(amounts)
        for row, amount in zip(rows, amounts, strict=True):
            if amount:
                self.requests.setdefault(row, []).extend(flat[:amount])
            del flat[:amount]

    @rule(pages=st.integers(0, 6))
    def alloc_whole_pages(self, pages: int) -> None:
        before = self.allocator.num_free_pages
        slots = self.allocator.alloc(pages * self.page_size)
        if pages > before:
            assert slots is None and self.allocator.num_free_pages == before
        elif pages:
            assert slots is not None
            self.serial += 1
            self.requests[self.serial] = slots.tolist()

    @rule(pages=st.integers(1, 3))
    def alloc_pages(self, pages: int) -> None:
        first = self.allocator.alloc_pages(pages)
        if first is None:
            assert pages > self.allocator.num_free_pages
            return
        for slot in first.tolist():
            self.serial += 1
            self.requests[self.serial] = list(range(slot, slot + self.page_size))

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), one_slot_per_page=st.booleans())
    def free_request(self, data: st.DataObject, one_slot_per_page: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.requests)))
        slots = self.requests.pop(row)
        given = slots[:: self.page_size] if one_slot_per_page else slots
        given = data.draw(st.permutations(given)) if len(given) < 50 else given
        self.allocator.free(torch.tensor(given))
        self.expect_free(slots)
        with pytest.raises(RuntimeError, match="double free"):
            self.allocator.free(torch.tensor(slots[-1:]))

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data())
    def free_tail(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.requests)))
        slots = self.requests[row]
        keep_pages = data.draw(st.integers(0, len(slots) // self.page_size))
        tail = slots[keep_pages * self.page_size :]
        self.allocator.free(torch.tensor(tail, dtype=torch.int64))
        self.expect_free(tail)
        self.requests[row] = slots[: keep_pages * self.page_size]
        if not self.requests[row]:
            del self.requests[row]

    @precondition(lambda self: len(self.requests) > 1)
    @rule()
    def free_group(self) -> None:
        free_before = self.allocator.available_size()
        doomed = sorted(self.requests)[:2]
        with self.allocator.free_group():
            for row in doomed:
                slots = self.requests.pop(row)
                self.allocator.free(torch.tensor(slots))
                self.expect_free(slots)
                assert self.allocator.available_size() == free_before
                with pytest.raises(RuntimeError, match="double free"):
                    self.allocator.free(torch.tensor(slots[:1]))

    @invariant()
    def books_balance(self) -> None:
        held = self.held_pages()
        free = self.num_pages - held
        assert self.allocator.num_free_pages == free
        assert self.allocator.available_size() == free * self.page_size
        owner: dict[int, int] = {}
        for row, slots in self.requests.items():
            assert len(set(slots)) == len(slots)
            for position, slot in enumerate(slots):
                assert slot % self.page_size == position % self.page_size
                page = slot // self.page_size
                assert 1 <= page <= self.num_pages
                assert owner.setdefault(page, row) == row, "page owned twice"
        assert self.allocator.owned_pages().tolist() == sorted(owner)
        assert sorted(self.freed) == sorted(self.expected_freed)


@pytest.mark.timeout(1800)
def test_allocators_agree_with_a_set_model() -> None:
    run_state_machine_as_test(
        AllocatorMachine,
        settings=settings(
            max_examples=count(ci=30, full=1000),
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            phases=[
                Phase.generate
            ],  # a failure prints its steps; shrinking takes minutes
        ),
    )


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_every_slot_can_be_used_and_comes_back(page_size: int) -> None:
    allocator = create_allocator(size=16 * page_size, page_size=page_size)
    slots = allocator.alloc(16 * page_size)
    assert slots is not None
    assert sorted(slots.tolist()) == list(range(page_size, 17 * page_size))
    assert allocator.alloc(page_size) is None
    allocator.free(slots)
    assert allocator.available_size() == 16 * page_size


@pytest.mark.parametrize("page_size", [1, 4])
def test_refusals_name_slot_and_page(page_size: int) -> None:
    allocator = create_allocator(size=8 * page_size, page_size=page_size)
    slots = allocator.alloc(2 * page_size)
    assert slots is not None
    outside = 9 * page_size
    for bad, text in (
        (0, r"slot 0 \(page 0\): scratch"),
        (page_size - 1, r"page 0\): scratch"),
        (outside, rf"slot {outside} \(page 9\): out of range"),
        (-3, r"slot -3 .*out of range"),
        (5 * page_size, rf"double free of slot {5 * page_size} \(page 5\)"),
    ):
        with pytest.raises(RuntimeError, match=text):
            allocator.free(torch.tensor([int(slots[0]), bad]))
    twice = torch.tensor([int(slots[0]), int(slots[0])])
    with pytest.raises(RuntimeError, match="given twice"):
        allocator.free(twice)
    assert allocator.available_size() == 6 * page_size, "a refused free took effect"
    allocator.free(slots)
    with pytest.raises(RuntimeError, match="double free"):
        allocator.free(slots)


def test_wrong_sizes_are_value_errors() -> None:
    with pytest.raises(ValueError, match="multiple of page_size=16"):
        create_allocator(size=100, page_size=16)
    with pytest.raises(ValueError, match="page_size=0"):
        create_allocator(size=4, page_size=0)
    with pytest.raises(ValueError, match="num_slots=5"):
        create_allocator(size=16, page_size=4).alloc(5)
    with pytest.raises(ValueError, match="int32"):
        TokenToKVPoolAllocator(size=2**31)


def test_extend_refuses_a_last_slot_that_does_not_fit() -> None:
    allocator = create_allocator(size=64, page_size=4)
    slots = allocator.alloc_extend(prefix_lens=[0], seq_lens=[6], last_locs=NO_LOCS)
    assert slots is not None
    free = allocator.available_size()
    for wrong in (int(slots[-1]) + 1, int(slots[-1]) + 4, 1, -3, 10_000 * 4 + 1):
        with pytest.raises(RuntimeError, match="cannot continue after slot"):
            allocator.alloc_extend(
                prefix_lens=[6], seq_lens=[9], last_locs=torch.tensor([wrong])
            )
    assert allocator.available_size() == free
    grown = allocator.alloc_extend(
        prefix_lens=[6], seq_lens=[9], last_locs=slots[-1:].clone()
    )
    assert grown is not None
    last = int(slots[-1])
    assert grown.tolist()[:2] == [last + 1, last + 2]


@pytest.mark.parametrize("page_size", [1, 4])
def test_extend_refuses_to_shrink(page_size: int) -> None:
    allocator = create_allocator(size=64, page_size=page_size)
    with pytest.raises(RuntimeError, match="request 1 shrinks from 8 to 4"):
        allocator.alloc_extend(
            prefix_lens=[0, 8], seq_lens=[8, 4], last_locs=torch.tensor([0, 11])
        )
    assert allocator.available_size() == 64


@pytest.mark.parametrize("page_size", [1, 4])
def test_extend_of_nobody_is_empty(page_size: int) -> None:
    allocator = create_allocator(size=64, page_size=page_size)
    none = torch.empty(0, dtype=torch.int64)
    slots = allocator.alloc_extend(prefix_lens=[], seq_lens=[], last_locs=none)
    assert slots is not None and slots.shape == (0,)
    allocator.free(none)


def test_hooks_see_whole_pages_before_reuse() -> None:
    allocator = create_allocator(size=16, page_size=4)
    first = allocator.alloc_extend(prefix_lens=[0], seq_lens=[5], last_locs=NO_LOCS)
    assert first is not None
    seen: list[tuple[list[int], int]] = []
    allocator.register_on_free(
        lambda slots: seen.append((slots.tolist(), allocator.available_size()))
    )
    allocator.free(first[4:])
    assert seen == [([8, 9, 10, 11], 8)], "the page is not takeable during the hook"
    again = allocator.alloc_pages(1)
    assert again is not None and again.tolist() == [8], "latest freed page first"


def test_groups_do_not_nest_silently() -> None:
    allocator = create_allocator(size=16, page_size=4)
    with pytest.raises(RuntimeError, match="no group"):
        allocator.free_group_end()
    allocator.free_group_begin()
    with pytest.raises(RuntimeError, match="open already"):
        allocator.free_group_begin()
    allocator.free_group_end()


def test_clear_reports_what_was_owned() -> None:
    allocator = create_allocator(size=16, page_size=4)
    allocator.alloc(8)
    seen: list[int] = []
    allocator.register_on_free(lambda slots: seen.extend(slots.tolist()))
    allocator.clear()
    assert seen == list(range(4, 12))
    assert allocator.available_size() == 16


def test_lengths_may_be_arrays() -> None:
    allocator = create_allocator(size=64, page_size=4)
    slots = allocator.alloc_extend(
        prefix_lens=np.array([0, 0]),
        seq_lens=np.array([3, 6]),
        last_locs=torch.zeros(2, dtype=torch.int64),
    )
    assert slots is not None
    assert slots.tolist() == [4, 5, 6, 8, 9, 10, 11, 12, 13]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
