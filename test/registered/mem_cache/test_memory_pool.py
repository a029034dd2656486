"""Request rows and KV bytes: what is written where, moves, and refusals."""

from __future__ import annotations

import math
import mmap
import resource
import sys
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    ReqToTokenPool,
    kv_bytes_per_token,
)
from sglang.srt.utils import memory
from sglang.srt.utils.memory import HostBlocks, host_zeros
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.lazy_memory import lazy_zeros
from sglang.test.scale import count

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=10, suite="cuda")

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
]

PROPERTY = settings(
    max_examples=count(ci=100, full=3000), deadline=None, derandomize=True
)


def req_to_token_pool(
    *, size: int = 4, row_width: int = 20, context_len: int = 16, device: str = "cpu"
) -> ReqToTokenPool:
    return ReqToTokenPool(
        size=size, row_width=row_width, device=device, context_len=context_len
    )


def mha_pool(
    *,
    size: int = 24,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=dtype,
        layer_num=3,
        head_num=2,
        head_dim=8,
        device=device,
    )


# -- rows ------------------------------------------------------------------------------


def test_tables_start_at_zero_and_have_the_declared_shapes() -> None:
    pool = req_to_token_pool(row_width=20, context_len=16)
    assert pool.req_to_token.shape == (5, 20) and pool.token_table.shape == (5, 20)
    assert pool.req_to_token.dtype == pool.token_table.dtype == torch.int32
    assert not pool.req_to_token.any() and not pool.token_table.any()
    assert req_to_token_pool(row_width=20, context_len=33).token_table.shape == (5, 33)
    with pytest.raises(ValueError, match="size=0"):
        req_to_token_pool(size=0)


@PROPERTY
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_rows_are_owned_once(ops: list[tuple[bool, int]]) -> None:
    pool = req_to_token_pool(size=6)
    used: list[int] = []
    for take, amount in ops:
        if take:
            rows = pool.alloc(amount)
            if amount > 6 - len(used):
                assert rows is None
            else:
                assert rows is not None and len(rows) == amount
                used.extend(rows)
        else:
            given_back, used = used[:amount], used[amount:]
            pool.free(given_back)
            if given_back:
                with pytest.raises(RuntimeError, match="not in use"):
                    pool.free(given_back[:1])
        assert len(set(used)) == len(used) and all(1 <= row <= 6 for row in used)
        assert pool.available_size() == 6 - len(used)


def test_padding_row_is_never_freed() -> None:
    for row in (0, 5, -1):
        with pytest.raises(RuntimeError, match=f"row {row}"):
            req_to_token_pool(size=4).free([row])


@pytest.mark.parametrize("device", DEVICES)
@PROPERTY
@given(data=st.data())
def test_batch_writes_equal_a_loop(device: str, data: st.DataObject) -> None:
    width = 20
    pool = req_to_token_pool(size=5, row_width=width, device=device)
    want = np.zeros((6, width), dtype=np.int32)
    for _ in range(3):
        rows = data.draw(st.permutations(range(1, 6)))[: data.draw(st.integers(0, 5))]
        decode = data.draw(st.booleans())
        starts = [data.draw(st.integers(0, width - 1)) for _ in rows]
        lens = [
            1 if decode else data.draw(st.integers(0, width - start))
            for start in starts
        ]
        slots = torch.randint(1, 10_000, (sum(lens),))
        returned = pool.write_batch(rows, starts, lens, slots)
        assert returned.device.type == device and returned.dtype == torch.int64
        assert torch.equal(returned.cpu(), slots)
        rest = slots.tolist()
        for row, start, length in zip(rows, starts, lens, strict=True):
            want[row, start : start + length] = rest[:length]
            del rest[:length]
        assert np.array_equal(pool.req_to_token.cpu().numpy(), want)
        for row in rows:
            got = pool.row_slots(row, 3, 11)
            assert got.dtype == torch.int64 and got.tolist() == want[row, 3:11].tolist()
        ends = [max(s + n, 1) for s, n in zip(starts, lens, strict=True)]
        want_last = [want[row, e - 1] for row, e in zip(rows, ends, strict=True)]
        assert pool.last_locs(rows, ends).tolist() == want_last


@pytest.mark.parametrize("device", DEVICES)
@PROPERTY
@given(data=st.data())
def test_many_rows_equal_one_write_each(device: str, data: st.DataObject) -> None:
    """In pieces of any size."""
    width = 20
    pool = req_to_token_pool(size=5, row_width=width, device=device)
    rows = data.draw(st.permutations(range(1, 6)))[: data.draw(st.integers(0, 5))]
    parts = [
        np.arange(100 * row, 100 * row + data.draw(st.integers(0, width)))
        for row in rows
    ]
    want = np.zeros((6, width), dtype=np.int32)
    for row, part in zip(rows, parts, strict=True):
        want[row, : len(part)] = part
    with patch.object(memory_pool, "WRITE_AT_ONCE", data.draw(st.integers(1, 120))):
        pool.write_rows(rows, parts)
        pool.write_token_rows(rows, parts)
    assert np.array_equal(pool.req_to_token.cpu().numpy(), want)
    assert np.array_equal(pool.token_table.cpu().numpy(), want)
    for row in rows:
        assert pool.row_slots(row, 0, width).tolist() == want[row].tolist()


def test_row_slots_is_a_copy() -> None:
    pool = req_to_token_pool()
    pool.write(2, 0, torch.tensor([5, 6, 7]))
    before = pool.row_slots(2, 0, 3)
    pool.write(2, 0, torch.tensor([9, 9, 9]))
    assert before.tolist() == [5, 6, 7]


def test_a_write_past_the_row_is_refused_and_harms_nobody() -> None:
    pool = req_to_token_pool(row_width=8)
    with pytest.raises(RuntimeError, match=r"row 2: columns \[6, 9\).*width 8"):
        pool.write_batch([1, 2], [0, 6], [2, 3], torch.arange(5))
    with pytest.raises(RuntimeError, match="3 slots for 2 columns"):
        pool.write_batch([1], [0], [2], torch.arange(3))
    with pytest.raises(RuntimeError, match=r"columns \[4, 9\)"):
        pool.row_slots(1, 4, 9)
    assert not pool.req_to_token.any()


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_written_per_row(device: str) -> None:
    pool = req_to_token_pool(row_width=8, context_len=12, device=device)
    pool.write_tokens([3, 1], [0, 10], [3, 2], torch.tensor([7, 8, 9, 4, 5]))
    assert pool.token_table[3, :4].tolist() == [7, 8, 9, 0]
    assert pool.token_table[1, 9:].tolist() == [0, 4, 5]
    assert int(pool.token_table.count_nonzero()) == 5
    with pytest.raises(RuntimeError, match="width 12"):
        pool.write_tokens([1], [11], [2], torch.tensor([1, 2]))


# -- KV bytes --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_set_and_get(dtype: torch.dtype) -> None:
    pool = mha_pool(dtype=dtype)
    k0, v0 = pool.get_kv_buffer(0)
    assert k0.shape == v0.shape == (28, 2, 8) and k0.dtype == dtype
    assert not pool.k_buffer.any() and not pool.v_buffer.any()
    slots = torch.tensor([9, 4, 27])
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pool.set_kv_buffer(1, slots, k, v)
    k1, v1 = pool.get_kv_buffer(1)
    assert torch.equal(k1[slots], k.to(dtype)) and torch.equal(v1[slots], v.to(dtype))
    others = torch.ones(28, dtype=torch.bool)
    others[slots] = False
    assert not k1[others].any() and not k0.any()
    assert k1.data_ptr() == pool.k_buffer[1].data_ptr(), "must be a view"


@pytest.mark.parametrize("device", DEVICES)
@PROPERTY
@given(data=st.data())
def test_move_loads_everything_before_it_stores(
    device: str, data: st.DataObject
) -> None:
    pool = mha_pool(device=device)
    pool.k_buffer.copy_(torch.randn_like(pool.k_buffer))
    pool.v_buffer.copy_(torch.randn_like(pool.v_buffer))
    slots = st.integers(0, 27)
    dst = data.draw(st.lists(slots, max_size=28, unique=True))
    src = data.draw(st.lists(slots, min_size=len(dst), max_size=len(dst)))
    want_k, want_v = pool.k_buffer.clone(), pool.v_buffer.clone()
    for d, s in zip(dst, src, strict=True):
        want_k[:, d], want_v[:, d] = pool.k_buffer[:, s], pool.v_buffer[:, s]
    seen: list[tuple[list[int], list[int]]] = []
    pool.register_on_move(lambda d, s: seen.append((d.tolist(), s.tolist())))
    as_slots = [torch.tensor(x, dtype=torch.int64, device=device) for x in (dst, src)]
    pool.move_kv_cache(as_slots[0], as_slots[1])
    assert torch.equal(pool.k_buffer, want_k) and torch.equal(pool.v_buffer, want_v)
    assert seen == [(dst, src)]


def test_move_refuses_unequal_lists() -> None:
    with pytest.raises(RuntimeError, match="move of 2 slots to 1"):
        mha_pool().move_kv_cache(torch.tensor([4]), torch.tensor([5, 6]))


def test_sources_describe_the_bytes() -> None:
    pool = mha_pool(dtype=torch.bfloat16)
    sources = pool.canary_sources()
    assert [source.name for source in sources] == ["k", "v"]
    pool.set_kv_buffer(2, torch.tensor([11]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    for source in sources:
        assert source.layer_num == 3 and source.bytes_per_slot == 2 * 8 * 2
        raw = source.buffer.view(torch.uint8).reshape(-1)
        begin = 2 * source.layer_stride_bytes + 11 * source.slot_stride_bytes
        inside = raw[begin : begin + source.bytes_per_slot].view(torch.bfloat16)
        assert (inside == 1).all() and int(raw.count_nonzero()) == 16 * 2


def test_sizes_are_checked_and_counted() -> None:
    with pytest.raises(ValueError, match="size=10: .*page_size=4"):
        mha_pool(size=10)
    bytes_per_token = kv_bytes_per_token(
        layer_num=3, head_num=2, head_dim=8, dtype=torch.bfloat16
    )
    pool = mha_pool(dtype=torch.bfloat16)
    total = pool.k_buffer.nbytes + pool.v_buffer.nbytes
    assert pool.nbytes == total == bytes_per_token * (pool.size + pool.page_size)


def test_copies_lie_behind_one_another_at_cache_lines() -> None:
    sizes = [(5, 7), (1,), (0, 3), (700, 1000), (3, 2000, 1000), (33,)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    tensors = [
        torch.arange(math.prod(size)).to(dtype).view(size)
        for size in sizes
        for dtype in dtypes
    ]
    blocks = HostBlocks(sum(tensor.nbytes for tensor in tensors))
    copies = [blocks.copy(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy) and copy.dtype == tensor.dtype
        assert copy.is_contiguous() and copy.data_ptr() % 64 == 0
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
    distinct = {copy.untyped_storage().data_ptr() for copy in copies if copy.numel()}
    assert len(distinct) < len(tensors)
    small = [copies[0], copies[1]]
    assert small[1].data_ptr() - small[0].data_ptr() == 192  # 140 bytes and the rest


def test_a_copy_of_what_is_not_contiguous() -> None:
    tensor = torch.arange(12).view(3, 4).t()
    assert torch.equal(HostBlocks(0).copy(tensor), tensor)


Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class TestHostZeros:
    # Below and above what huge pages are for; neither a multiple of anything.
    @pytest.mark.parametrize("zeros", [host_zeros, lazy_zeros])
    @pytest.mark.parametrize("rows", [3, 12_289])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_zeros_that_outlive_their_first_name(
        self, zeros: Zeros, rows: int, dtype: torch.dtype
    ) -> None:
        whole = zeros((2, rows, 7, 13), dtype)
        assert whole.shape == (2, rows, 7, 13)
        assert whole.dtype is dtype and whole.is_contiguous()
        assert not whole.any()
        last = whole[1]
        del whole
        last[-1] = 1
        assert last.sum(dtype=torch.float64) == 7 * 13

    @pytest.mark.parametrize("zeros", [host_zeros, lazy_zeros])
    def test_two_share_no_memory(self, zeros: Zeros) -> None:
        one, other = (zeros((3 << 20,), torch.uint8) for _ in range(2))
        one.fill_(1)
        assert not other.any()

    @pytest.mark.skipif(sys.platform != "linux", reason="counts faults of a thread")
    @pytest.mark.parametrize("advice", [None, 9999])
    def test_all_of_it_is_there(
        self, monkeypatch: pytest.MonkeyPatch, advice: int | None
    ) -> None:
        """With a kernel that takes memory by advice, and with one that does not."""
        if advice is not None:
            monkeypatch.setattr(memory, "_POPULATE_WRITE", advice)
        tensor = host_zeros((64 << 20,), torch.uint8)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        assert not tensor[:: mmap.PAGESIZE].any()
        tensor[:: mmap.PAGESIZE] = 1
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert faults < 100  # of 16,384 pages


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
