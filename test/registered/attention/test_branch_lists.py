"""Lists and tables of draft branches, and the effect of fault points on them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from sglang.faults.fault_points import (
    SHORT_BRANCH_TABLE,
    SMALL_INDEX_BUFFER,
)
from sglang.srt.configs.draft_layout import BranchLayout
from sglang.srt.layers.attention.branch_lists import BranchLists
from sglang.srt.layers.attention.cpu_backends import (
    TorchNativeAttnBackend,
)
from sglang.srt.layers.attention.paged_backend import (
    BranchDraftDecode,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.ops.branch_slots.op import SlotRows
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=8, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT = 64
LENS = [13, 0, 30, 16]
LAYOUTS = [
    BranchLayout(page_size=page, topk=topk, num_steps=steps)
    for page, topk, steps in [(1, 1, 2), (1, 4, 3), (4, 2, 5), (16, 8, 3), (64, 1, 4)]
] + [
    BranchLayout(
        page_size=page,
        topk=topk,
        num_steps=steps,
        region=max(LENS),
    )
    for page, topk, steps in [(1, 4, 3), (4, 2, 5), (16, 8, 3)]
]


class World:
    """Four requests whose pages were handed out in random order."""

    def __init__(self, layout: BranchLayout) -> None:
        self.layout = layout
        page = layout.page_size
        width = -(-max(map(layout.end_column, LENS)) // page) * page
        pages = width // page
        rng = torch.Generator().manual_seed(page)
        order = 1 + torch.randperm(pages * len(LENS), generator=rng)
        slots = order.view(len(LENS), pages, 1) * page + torch.arange(page)
        self.columns = slots.view(len(LENS), width)
        self.pool = ReqToTokenPool(
            size=len(LENS), row_width=width, device=DEVICE, context_len=CONTEXT
        )
        self.indices = self.pool.alloc(len(LENS))
        assert self.indices is not None
        for row, columns in zip(self.indices, self.columns, strict=True):
            self.pool.write(row, 0, columns)
        self.rows = SlotRows(
            self.pool.req_to_token,
            torch.tensor(self.indices, device=DEVICE),
            torch.tensor(LENS, device=DEVICE),
        )

    def wanted(self, step: int) -> list[list[int]]:
        """The slots that each branch reads: the prefix, then its own."""
        lists = []
        for columns, length in zip(self.columns.tolist(), LENS, strict=True):
            for branch in range(self.layout.topk):
                own = [
                    columns[self.layout.draft_column(length, branch, s)]
                    for s in range(step + 1)
                ]
                lists.append(columns[:length] + own)
        return lists

    def lists(self) -> BranchLists:
        return BranchLists(self.layout, max_requests=len(LENS) + 2, pool=self.pool)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_lists_hold_prefix_and_branch(layout: BranchLayout) -> None:
    world = World(layout)
    lists = world.lists()
    host = lists.plan(LENS, requests=len(LENS))
    lists.fill(world.rows)
    branches = len(LENS) * layout.topk
    assert host.rows == branches and host.ones.tolist() == [1] * branches
    on_device = lists.indptr[: lists.steps * (branches + 1)].view(lists.steps, -1)
    # The kernels read the same offsets that the plan is made from.
    assert torch.equal(host.indptr, on_device.cpu())
    for step in range(lists.steps):
        bounds, flat = host.indptr[step].tolist(), lists.indices[step].tolist()
        found = [flat[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        assert found == world.wanted(step), step
    assert lists.guards_are_intact()


def test_requests_after_the_live_ones_read_their_own_slots_alone() -> None:
    lists = World(LAYOUTS[1]).lists()
    host = lists.plan([7], requests=3)
    assert host.indptr.diff().tolist() == [[8 + i] * 4 + [1 + i] * 8 for i in (0, 1)]


def test_the_longest_batch_fits_and_no_longer_one() -> None:
    world = World(LAYOUTS[2])
    lists = world.lists()
    requests = len(LENS) + 2
    # With its root: a language model reads that before it drafts.
    lists.plan([CONTEXT + 1] * requests, requests=requests)
    with pytest.raises(RuntimeError, match=rf"holds {lists.capacity} per step.*top-k"):
        lists.plan([CONTEXT + 3] * requests, requests=requests)


def test_27338_an_index_buffer_without_the_factor_is_seen() -> None:
    """Declared without top-k inside the whole allocation: short lists still fit, long
    ones are refused before any kernel runs, and nothing is written after them."""
    world = World(LAYOUTS[3])
    with SMALL_INDEX_BUFFER.opened():
        small = world.lists()
    whole = world.lists()
    assert whole.capacity == world.layout.topk * small.capacity
    small.plan([1] * len(LENS), requests=len(LENS))
    whole.plan([60] * len(LENS), requests=len(LENS))
    with pytest.raises(RuntimeError, match="must be sized with the factor top-k"):
        small.plan([60] * len(LENS), requests=len(LENS))
    # Even without the check the kernels know where the lists end.
    small.fill(world.rows)
    assert small.guards_are_intact()
    small._memory[small.indices.numel()] = 5
    assert not small.guards_are_intact()


@pytest.mark.parametrize("layout", LAYOUTS[1:4], ids=repr)
def test_27360_lists_of_one_slot_less_show(layout: BranchLayout) -> None:
    world = World(layout)
    with SHORT_BRANCH_TABLE.opened():
        lists = world.lists()
    host = lists.plan(LENS, requests=len(LENS))
    lists.fill(world.rows)
    for step in range(lists.steps):
        bounds, flat = host.indptr[step].tolist(), lists.indices[step].tolist()
        for z, wanted in enumerate(world.wanted(step)):
            assert flat[bounds[z] : bounds[z + 1]] == [*wanted[:-1], 0]


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS[1:4], ids=repr)
def test_27360_tables_of_one_slot_less_show(
    layout: BranchLayout, is_short: bool
) -> None:
    world = World(layout)
    kv_pool = MHATokenToKVPool(
        size=2 * layout.page_size,
        page_size=layout.page_size,
        dtype=torch.float32,
        layer_num=1,
        head_num=1,
        head_dim=8,
        device=DEVICE,
    )
    backend = TorchNativeAttnBackend(req_to_token_pool=world.pool, kv_pool=kv_pool)
    with SHORT_BRANCH_TABLE.opened() if is_short else nullcontext():
        draft = BranchDraftDecode(backend, layout=layout, max_requests=len(LENS))
    draft.prepare(world.rows)
    table, page = draft.page_table.tolist(), layout.page_size
    last = layout.num_steps - 2
    for z, wanted in enumerate(world.wanted(last)):
        element = len(wanted) - 1
        listed = table[z][element // page] + element % page
        assert (listed == wanted[-1]) is not is_short
        assert not is_short or table[z][element // page] == 0


def test_lists_that_int32_cannot_address_are_refused() -> None:
    pool = ReqToTokenPool(size=1, row_width=8, device="cpu", context_len=1 << 24)
    layout = BranchLayout(page_size=1, topk=32, num_steps=2)
    with pytest.raises(ValueError, match="--max-running-requests"):
        BranchLists(layout, max_requests=8, pool=pool)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
