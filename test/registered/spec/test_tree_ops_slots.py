"""Slots of draft branches against plain Python models of a paged pool."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_ops_world import DEVICE, TRITON, garbage, kernels, op

from sglang.srt.arg_groups.draft_slots import (
    decode_reserve,
    decode_spare,
    region_columns,
)
from sglang.srt.configs.draft_kinds import DRAFT_KINDS
from sglang.srt.configs.draft_layout import (
    BranchLayout,
    TreeShape,
    alloc_len_per_decode,
)
from sglang.srt.mem_cache.draft_region import DraftRegion
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.ops.branch_slots import op as slot_ops
from sglang.srt.mem_cache.ops.branch_slots.op import BranchPaths, SlotRows
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import is_full

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

register_cpu_ci(est_time=13, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

PAGE_SIZES, TOPKS, STEPS = (1, 4, 16, 64), (1, 2, 4, 8), (1, 2, 3, 4, 5)


def chosen_op(name: str, implementation: str):
    if implementation == "reference":
        return getattr(slot_ops, f"{name}_ref")
    return op(name, implementation)


def layouts(implementation: str) -> Iterator[BranchLayout]:
    """All of them, without a region and with one; a covering sample where Triton's
    interpreter runs them."""
    numbers = itertools.product(PAGE_SIZES, TOPKS, STEPS)
    is_slow = implementation == TRITON and DEVICE == "cpu" and not is_full()
    for place, (page, topk, steps) in enumerate(numbers):
        for region in (None, 4 * page):
            if is_slow and (place + (region is None)) % 7:
                continue
            yield BranchLayout(
                page_size=page, topk=topk, num_steps=steps, region=region
            )


def lens_for(layout: BranchLayout, implementation: str) -> list[int]:
    page = layout.page_size
    every = implementation != TRITON and page <= 16
    tails = range(page) if every else {0, 1, page // 2, page - 1}
    return [page * (1 + tail % 3) + tail for tail in sorted(tails)]


class Pool:
    """A batch whose pages were handed out in random order, in the host's tables.

    A row's region, if the layout has one, begins in a page of its own.
    """

    def __init__(
        self, layout: BranchLayout, lens: list[int], *, spare: int = 0
    ) -> None:
        self.layout, self.lens = layout, lens
        page = layout.page_size
        need = max(layout.end_column(length) for length in lens)
        self.width = -(-need // page) * page + spare
        pages = -(-self.width // page)
        order = 1 + torch.randperm(pages * (len(lens) + 1))
        table = order.view(len(lens) + 1, pages, 1) * page + torch.arange(page)
        table = table.view(len(lens) + 1, -1)[:, : self.width]
        table[0] = 0
        self.indices = 1 + torch.randperm(len(lens))
        self.columns = [table[i].tolist() for i in self.indices]
        self.rows = SlotRows(
            table.int().to(DEVICE).contiguous(),
            self.indices.to(DEVICE),
            torch.tensor(lens, device=DEVICE),
        )

    def branch_slots(self, q: int, branch: int) -> list[int]:
        """The draft slots of a branch, found by walking its pages one by one."""
        length, page = self.lens[q], self.layout.page_size
        region, steps = self.layout.region, self.layout.num_steps
        if region is not None:
            own = self.columns[q][region:]
            return own[branch * steps : (branch + 1) * steps]
        if page == 1 or self.layout.topk == 1:
            first = length + branch * self.layout.num_steps
            return self.columns[q][first : first + self.layout.num_steps]
        tail = length % page
        pages = 1
        while pages * page < tail + self.layout.num_steps:
            pages += 1
        begin = length - tail + branch * pages * page
        own = self.columns[q][begin : begin + pages * page]
        return own[tail : tail + self.layout.num_steps]


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_draft_slots(implementation: str) -> None:
    for layout in layouts(implementation):
        pool = Pool(layout, lens_for(layout, implementation))
        n = len(pool.lens)
        out = garbage(layout.num_steps, n * layout.topk)
        chosen_op("draft_out_cache_loc", implementation)(
            pool.rows, layout=layout, out=out
        )
        by_branch = out.view(layout.num_steps, n, layout.topk).permute(1, 2, 0)
        found = by_branch.tolist()
        for q in range(n):
            wanted = [pool.branch_slots(q, t) for t in range(layout.topk)]
            assert found[q] == wanted, (layout, pool.lens[q])
            flat = [slot for branch in found[q] for slot in branch]
            # No slot twice, none of the prefix's, none of the scratch page.
            prefix = pool.columns[q][: pool.lens[q]]
            assert len({*flat, *prefix}) == len(flat) + pool.lens[q]
            assert min(flat) >= layout.page_size
            if layout.region is None and layout.page_size > 1:
                pages = [{slot // layout.page_size for slot in b} for b in found[q]]
                assert sum(map(len, pages)) == len(set().union(*pages))


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_branches_read_their_tokens_through_pages(implementation: str) -> None:
    """Tail copies, page tables and draft writes, played on a pool of numbers: each
    branch must read the prefix and then its own drafts."""
    for layout in layouts(implementation):
        page, topk, steps = layout.page_size, layout.topk, layout.num_steps
        pool = Pool(layout, lens_for(layout, implementation))
        n = len(pool.lens)
        kv = garbage(int(pool.rows.req_to_token.max()) + page)
        for q, length in enumerate(pool.lens):
            prefix = torch.tensor(pool.columns[q][:length], device=DEVICE)
            kv[prefix] = 1000 * q + torch.arange(length, device=DEVICE)
        copies = 0 if layout.region else topk - 1
        size = n * copies * (page - 1)
        src = garbage(size)
        dst = src.clone()
        chosen_op("duplicate_prefix_tail", implementation)(
            pool.rows, layout=layout, src=src, dst=dst
        )
        copied = dst[dst != 0]
        if size:
            assert len(copied) == copies * sum(x % page for x in pool.lens)
        assert len(copied.unique()) == len(copied)
        assert bool((src[dst == 0] == 0).all())
        kv[dst] = kv[src]
        locs = garbage(steps, n * topk)
        chosen_op("draft_out_cache_loc", implementation)(
            pool.rows, layout=layout, out=locs
        )
        branch = torch.arange(n * topk, device=DEVICE)
        for step in range(steps):
            kv[locs[step]] = -(100 * branch + step + 1)
        columns = -(-pool.width // page) + 2
        paged = garbage(n * topk, columns, dtype=torch.int32)
        tokens = garbage(n * topk, pool.width, dtype=torch.int32)
        own = garbage(n * topk, 7, dtype=torch.int32)
        fill = chosen_op("branch_table", implementation)
        has_pages = page == 1 or layout.region is None
        if has_pages:
            fill(pool.rows, layout=layout, paged=True, out=paged)
            fill(pool.rows, layout=layout, paged=True, skip_prefix=True, out=own)
        fill(pool.rows, layout=layout, paged=False, out=tokens)
        lists = capacity_lists(pool, implementation)
        for z in range(n * topk):
            q = z // topk
            length = pool.lens[q]
            tail = length % page
            drafts = [-(100 * z + step + 1) for step in range(steps)]
            wanted = [1000 * q + e for e in range(length)] + drafts
            assert kv[tokens[z, : length + steps].long()].tolist() == wanted
            assert not tokens[z, length + steps :].any()
            if has_pages:
                assert read_paged(kv, paged[z], page, length + steps) == wanted
                used = -(-(length + steps) // page)
                assert not paged[z, used:].any()
                read = read_paged(kv, own[z], page, tail + steps)
                assert read == wanted[length - tail :]
            for step, (indptr, indices) in enumerate(lists):
                read = indices[indptr[z] : indptr[z + 1]]
                assert kv[read.long()].tolist() == wanted[: length + step + 1]


def capacity_lists(pool: Pool, implementation: str) -> list[tuple[Tensor, Tensor]]:
    layout = pool.layout
    steps = max(layout.num_steps - 1, 1)
    need = layout.topk * (sum(pool.lens) + len(pool.lens) * steps)
    indptr = garbage(steps, len(pool.lens) * layout.topk + 1, dtype=torch.int32)
    indices = garbage(steps, need, dtype=torch.int32)
    chosen_op("branch_token_indices", implementation)(
        pool.rows, layout=layout, indptr=indptr, indices=indices
    )
    for step in range(steps):
        used = int(indptr[step, -1])
        assert used == need - layout.topk * len(pool.lens) * (steps - 1 - step)
        assert bool((indices[step, used:] == -77).all())
    return list(zip(indptr, indices, strict=True))


def read_paged(kv: Tensor, table: Tensor, page: int, length: int) -> list[int]:
    element = torch.arange(length, device=DEVICE)
    return kv[table[element // page].long() + element % page].tolist()


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_token_lists_stop_at_the_declared_capacity(implementation: str) -> None:
    layout = BranchLayout(page_size=4, topk=2, num_steps=3)
    pool = Pool(layout, [9, 6])
    # Guard words follow the declared size of both steps' lists.
    memory = garbage(2 * 25 + 64, dtype=torch.int32)
    indices = memory[: 2 * 25].view(2, 25)
    indptr = garbage(2, 5, dtype=torch.int32)
    chosen_op("branch_token_indices", implementation)(
        pool.rows, layout=layout, indptr=indptr, indices=indices
    )
    assert indptr.tolist() == [[0, 10, 20, 27, 34], [0, 11, 22, 30, 38]]
    assert bool((memory[50:] == -77).all())
    assert not bool((indices == -77).any())


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_shifts_and_tail_slots(implementation: str) -> None:
    for layout in layouts(implementation):
        pool = Pool(layout, lens_for(layout, implementation), spare=3)
        n, topk = len(pool.lens), layout.topk
        for paged in (False,) if layout.region else (True, False):
            shift_from, shift = garbage(n * topk), garbage(n * topk)
            chosen_op("branch_shifts", implementation)(
                pool.rows,
                layout=layout,
                paged=paged,
                shift_from=shift_from,
                column_shift=shift,
            )
            for z in range(n * topk):
                length, branch = pool.lens[z // topk], z % topk
                first = length - length % layout.page_size if paged else length
                assert int(shift_from[z]) == first
                wanted = layout.draft_column(length, branch, 0) - length
                assert int(shift[z]) == wanted
        out = garbage(n, 9)
        chosen_op("tail_cache_loc", implementation)(pool.rows, out=out)
        for q, length in enumerate(pool.lens):
            # Behind the row's end there is nothing but scratch.
            columns = [*pool.columns[q], *[0] * 9]
            assert out[q].tolist() == columns[length : length + 9]


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
@pytest.mark.parametrize("begin", [0, 5])
def test_branches_read_their_ancestors(implementation: str, begin: int) -> None:
    """Against paths of (step, branch) that are carried from step to step, in tables
    and in lists, for random choices of candidates."""
    rng = random.Random(begin)
    sizes = [(3, 4, 5), (1, 2, 3), (2, 8, 4), (1, 3, 2), (0, 2, 3), (2, 32, 3)]
    for n, topk, steps in sizes:
        lens = [rng.randrange(9) for _ in range(n)]
        branches, columns = n * topk, 9 + steps
        parents = garbage(n, 1 + topk * (steps - 1))
        slots = torch.randperm(steps * branches, device=DEVICE) + 1
        slots = slots.view(steps, branches)
        paths = [[(0, t)] for _ in range(n) for t in range(topk)]
        begins = begin + columns * torch.arange(branches, device=DEVICE)
        out = garbage(begin + branches * columns, dtype=torch.int32)
        wanted = out.tolist()
        for step in range(steps - 1):
            if step:
                chosen = torch.tensor(
                    [[rng.randrange(topk**2) for _ in range(topk)] for _ in range(n)]
                ).view(n, topk)
                first = topk + topk**2 * (step - 1)
                at = slice(1 + topk * step, 1 + topk * (step + 1))
                parents[:, at] = (first + chosen).to(DEVICE)
                paths = [
                    [*paths[q * topk + choice // topk], (step, t)]
                    for q, row in enumerate(chosen.tolist())
                    for t, choice in enumerate(row)
                ]
            chosen_op("branch_ancestors", implementation)(
                step,
                BranchPaths(parents, slots, torch.tensor(lens, device=DEVICE).long()),
                begins=begins,
                out=out,
            )
            for z, path in enumerate(paths):
                first = begin + z * columns + lens[z // topk]
                for s, t in path[:step]:
                    wanted[first + s] = int(slots[s, z // topk * topk + t])
            # Neither the prefix nor the branch's own slot.
            assert out.tolist() == wanted, (n, topk, steps, step)
        short = out[: len(out) // 2].clone()
        chosen_op("branch_ancestors", implementation)(
            steps - 2,
            BranchPaths(parents, slots, torch.tensor(lens, device=DEVICE).long()),
            begins=begins,
            out=short,
        )
        assert short.tolist() == wanted[: len(short)]


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_narrow_rows_stay_in_memory(implementation: str) -> None:
    """A row that is too narrow for the branches gives scratch slots, not the next
    request's."""
    layout = BranchLayout(page_size=4, topk=4, num_steps=3)
    pool = Pool(layout, [10, 12])
    table = pool.rows.req_to_token[:, :16].contiguous()
    rows = SlotRows(table, *pool.rows[1:])
    out = garbage(3, 8)
    chosen_op("draft_out_cache_loc", implementation)(rows, layout=layout, out=out)
    for q, length in enumerate(pool.lens):
        for branch, step in itertools.product(range(4), range(3)):
            column = layout.draft_column(length, branch, step)
            wanted = pool.columns[q][column] if column < 16 else 0
            assert int(out[step, q * 4 + branch]) == wanted
    # Padding reads row 0, which holds nothing but the scratch slot.
    padding = SlotRows(table, pool.rows[1] * 0, pool.rows[2] * 0 + 1)
    chosen_op("draft_out_cache_loc", implementation)(padding, layout=layout, out=out)
    assert not out.any()


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_accepted_moves(implementation: str) -> None:
    torch.manual_seed(2)
    for steps, nodes in itertools.product(STEPS, (6, 8, 64)):
        rows = 4
        locs = torch.randperm(rows * nodes, device=DEVICE) + 1
        index = torch.full((rows, steps + 1), -1, device=DEVICE)
        lens = [1 + q % (steps + 1) for q in range(rows)]
        for q, length in enumerate(lens):
            path = 1 + torch.randperm(nodes - 1)[: length - 1].sort().values
            index[q, :length] = torch.cat([torch.zeros(1).long(), path]) + q * nodes
        src, dst = garbage(rows * (steps + 1)), garbage(rows * (steps + 1))
        chosen_op("accepted_moves", implementation)(
            index, out_cache_loc=locs, src=src, dst=dst
        )
        kv = torch.arange(rows * nodes + 1, device=DEVICE)
        kv[dst] = kv[src]
        for q, length in enumerate(lens):
            front = kv[locs[q * nodes : q * nodes + length]]
            assert front.tolist() == locs[index[q, :length]].tolist()
            pairs = zip(src.view(rows, -1)[q], dst.view(rows, -1)[q], strict=True)
            assert [(int(s), int(d)) for s, d in pairs][length:] == [(0, 0)] * (
                steps + 1 - length
            )


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ((1, 1, 5, 6), 6),
        ((64, 1, 5, 6), 6),
        ((1, 8, 5, 64), 64),
        ((4, 2, 3, 6), 16),
        ((4, 8, 5, 32), 64),
        ((16, 4, 5, 8), 128),
        ((64, 4, 3, 16), 512),
        ((64, 8, 5, 32), 1024),
        ((256, 8, 5, 32), 4096),
        ((512, 8, 5, 64), 8192),
    ],
)
def test_alloc_len_table(numbers: tuple[int, int, int, int], wanted: int) -> None:
    page, topk, steps, nodes = numbers
    found = alloc_len_per_decode(
        page_size=page, topk=topk, num_steps=steps, num_draft_tokens=nodes
    )
    assert found == wanted


@settings(derandomize=True, max_examples=300, deadline=None, database=None)
@given(
    page=st.sampled_from([1, 2, 4, 16, 64, 256, 512]),
    topk=st.integers(1, 8),
    steps=st.integers(1, 8),
    extra=st.integers(0, 64),
    length=st.integers(0, 5000),
    lead=st.integers(0, 1),
)
def test_alloc_len_covers_every_column(
    page: int, topk: int, steps: int, extra: int, length: int, lead: int
) -> None:
    layout = BranchLayout(page_size=page, topk=topk, num_steps=steps)
    nodes = steps + 1 + extra
    reserve = alloc_len_per_decode(
        page_size=page,
        topk=topk,
        num_steps=steps,
        num_draft_tokens=nodes,
        draft_lead=lead,
    )
    known = length + lead
    touched = [
        layout.draft_column(known, branch, step)
        for branch in range(topk)
        for step in range(steps)
    ]
    touched += range(length, length + nodes)
    touched += range(known, known + steps + 1)
    assert length <= min(touched) and max(touched) < length + reserve
    if page > 1 and topk > 1:
        assert layout.end_column(known) <= length + reserve
    in_region = alloc_len_per_decode(
        page_size=page,
        topk=topk,
        num_steps=steps,
        num_draft_tokens=nodes,
        draft_lead=lead,
        has_branches=False,
    )
    assert in_region == max(nodes, lead + steps + 1)
    if page > 1 and topk > 1 and not lead:
        worst = layout.end_column(length // page * page + page - 1)
        tight = worst - length // page * page
        assert reserve == max(tight, nodes)
    with pytest.raises(ValueError, match="topk is 0"):
        BranchLayout(page_size=page, topk=0, num_steps=steps)


@settings(derandomize=True, max_examples=200, deadline=None, database=None)
@given(
    page=st.sampled_from([1, 2, 4, 16, 64]),
    backend=st.sampled_from(["cpu_native", "triton"]),
    topk=st.integers(2, 8),
    steps=st.integers(1, 8),
    rows=st.integers(1, 5),
    pool_pages=st.integers(1, 50),
    lengths=st.lists(st.integers(0, 400), min_size=5, max_size=5),
)
def test_a_region_gives_every_branch_slots_of_its_own(
    page: int,
    backend: str,
    topk: int,
    steps: int,
    rows: int,
    pool_pages: int,
    lengths: list[int],
) -> None:
    """Against a model that hands out slots one after the other: row by row, branch by
    branch, each as many as it drafts, whatever the pages and the backend."""
    size = pool_pages * page
    tree = TreeShape(topk=topk, num_steps=steps, num_draft_tokens=steps + 1)
    args = SimpleNamespace(
        speculative_algorithm="EAGLE",
        draft_kind=DRAFT_KINDS["EAGLE"],
        speculative_draft_layout="region",
        attention_backend=backend,
        tree_shape=tree,
        tree_shapes=(tree,),
        page_size=page,
    )
    columns = region_columns(cast("ServerArgs", args))
    assert columns == topk * steps
    slots = DraftRegion(
        first_slot=size + page, rows=rows, columns=columns, page_size=page
    )
    pool = ReqToTokenPool(
        size=rows, row_width=401, device="cpu", context_len=400, region=slots
    )
    layout = BranchLayout(
        page_size=page,
        topk=topk,
        num_steps=steps,
        region=pool.row_width,
    )
    following = itertools.count(size + page)
    for row, length in zip(range(1, rows + 1), lengths, strict=False):
        for branch in range(topk):
            own = [next(following) for _ in range(steps)]
            for step in range(steps):
                column = layout.draft_column(length, branch, step)
                slot = int(pool.req_to_token[row, column])
                assert slot == own[step] < size + page + slots.size
            assert {slots.slot_to_row(slot) for slot in own} == {row}
    assert slots.slot_to_row(size + page - 1) == slots.slot_to_row(next(following)) == 0
    assert not pool.req_to_token[0].any() and slots.size % page == 0


@pytest.mark.parametrize("page", [1, 4, 64])
@pytest.mark.parametrize("place", ["region", "paged"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE"])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 3, 4), (1, 1, 2), (4, 3, 12), (8, 5, 64), (3, 6, 40)], ids=str
)
def test_the_reserve_covers_an_iteration_in_flight(
    shape: tuple[int, int, int],
    adaptive: bool,
    algorithm: str,
    place: str,
    page: int,
) -> None:
    """At every place in a page, whatever that one gains, without the spare slots."""
    topk, steps, nodes = shape
    tree = TreeShape(topk=topk, num_steps=steps, num_draft_tokens=nodes)
    layout = BranchLayout(page_size=page, topk=topk, num_steps=steps)
    lead = int(algorithm == "STANDALONE")
    args = SimpleNamespace(
        speculative_algorithm=algorithm,
        draft_kind=DRAFT_KINDS[algorithm],
        speculative_draft_layout=place,
        attention_backend="cpu_native",
        tree_shape=tree,
        tree_shapes=(tree,),
        speculative_adaptive=adaptive,
        device="cpu",
        page_size=page,
        draft_lead=lead,
    )
    args = cast("ServerArgs", args)
    reserve = decode_reserve(args) - decode_spare(args)
    for known in range(2 * page + 1):
        columns = -(-(known + reserve) // page) * page
        for gained in range(tree.accept_width + 1):
            length = known + gained
            last = layout.draft_column(length + lead, topk - 1, steps - 1)
            ends = [length + nodes, length + lead + tree.accept_width]
            if place == "paged" or topk == 1:
                ends.append(last + 1)
            if place == "paged" and page > 1 and topk > 1:
                ends.append(layout.end_column(length + lead))
            assert max(ends) <= columns


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
