"""Units: what goes in comes out, in other slots; and any change of a byte shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.kv_tiers.host_pool import HostPool
from sglang.srt.kv_tiers.ops.slot_sums.op import add_slot_sums, add_slot_sums_ref
from sglang.srt.kv_tiers.ops.unit_rows import triton as triton_rows
from sglang.srt.kv_tiers.ops.unit_rows.op import gather_rows_ref, scatter_rows_ref
from sglang.srt.kv_tiers.unit import (
    SlotTensor,
    UnitLayout,
    first_key,
    unit_keys,
    unit_tokens,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=10, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_like(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    size = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape).to(DEVICE)


@st.composite
def layouts(draw):
    """Two pools of slots of the same layout, and records beside them."""
    per_unit = draw(st.sampled_from((1, 3, 4)))
    slots = draw(st.integers(per_unit * 3, 20))
    shapes = draw(
        st.lists(
            st.tuples(
                st.booleans(),
                st.integers(1, 3),
                st.integers(1, 5),
                st.sampled_from((torch.float32, torch.bfloat16, torch.uint8)),
            ),
            min_size=1,
            max_size=3,
        )
    )
    has_records = draw(st.booleans())

    def create(seed):
        tensors = []
        for number, (has_layers, layers, width, dtype) in enumerate(shapes):
            shape = (layers, slots, width) if has_layers else (slots, layers, width)
            tensor = random_like(shape, dtype, seed + number)
            tensors.append(SlotTensor(f"t{number}", tensor, has_layers=has_layers))
        records = random_like((slots, 4), torch.int64, seed + 99)
        kept = (SlotTensor("records", records, has_layers=False),)
        return UnitLayout(per_unit, tuple(tensors), kept if has_records else ())

    return create(0), create(1000), slots


def arrive(layout, units, slots, rows):
    """Copy units into slots and compare them."""
    layout.scatter(units, slots, rows)
    return layout.compare(layout.tails(units).contiguous(), slots, rows)


@given(case=layouts(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_units_arrive_as_they_left(case, data):
    source, target, slots = case
    units = data.draw(st.integers(1, slots // source.slots))
    order = data.draw(st.permutations(range(slots)))[: units * source.slots]
    there = data.draw(st.permutations(range(slots)))[: units * source.slots]
    rows = sorted(data.draw(st.sets(st.sampled_from(range(len(order))), min_size=1)))
    memory = torch.zeros(
        (units, source.bytes_per_unit), dtype=torch.uint8, device=DEVICE
    )
    source.gather(torch.tensor(order, device=DEVICE), memory)
    before = [tensor.words.clone() for tensor in target.tensors]
    index = torch.tensor(rows, device=DEVICE)
    into = torch.tensor(there, device=DEVICE)[index]
    arrived = arrive(target, memory, into, index)
    assert arrived.is_intact.all()
    own = torch.tensor(order, device=DEVICE)[index]
    for mine, theirs, old in zip(source.tensors, target.tensors, before, strict=True):
        assert torch.equal(theirs.words[:, into], mine.words[:, own])
        untouched = torch.ones(slots, dtype=torch.bool, device=DEVICE)
        untouched[into] = False
        assert torch.equal(theirs.words[:, untouched], old[:, untouched])
    for mine, words in zip(source.records, arrived.records, strict=True):
        assert torch.equal(words, mine.words[0, own])


@given(case=layouts(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_byte_shows(case, data):
    source, target, _ = case
    memory = torch.zeros((2, source.bytes_per_unit), dtype=torch.uint8, device=DEVICE)
    every = torch.arange(2 * source.slots, device=DEVICE)
    source.gather(every, memory)
    changeable = source.offsets[-1] + 8 * source.slots
    sizes = [
        tensor.bytes_per_slot * source.slots
        for tensor in (*source.tensors, *source.records)
    ]
    # Bytes between two parts belong to nothing.
    used = [
        place
        for begin, size in zip(source.offsets, sizes, strict=False)
        for place in range(begin, begin + size)
    ]
    used += range(source.offsets[-1], changeable)
    place = data.draw(st.sampled_from(used))
    memory[1, place] ^= data.draw(st.integers(1, 255))
    assert arrive(target, memory, every, every).is_intact.tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("layers", "slots", "width"), [(1, 9, 1), (3, 70, 7), (2, 1100, 130), (5, 40, 1025)]
)
def test_sums_equal_the_reference(dtype, layers, slots, width):
    words = random_like((layers, slots, width), dtype, 3)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randperm(slots, generator=generator)[: slots // 2 + 1].to(DEVICE)
    sums = torch.arange(len(chosen), device=DEVICE)
    due = sums.clone()
    add_slot_sums(sums, words, chosen, first_layer=2)
    add_slot_sums_ref(due, words, chosen, first_layer=2)
    assert torch.equal(sums, due)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("layers", "per_unit", "width"), [(1, 1, 1), (3, 5, 7), (2, 16, 130), (2, 3, 1025)]
)
def test_kernels_of_rows_equal_their_reference(dtype, layers, per_unit, width):
    """Without a GPU in the interpreter."""
    units, slots = 2, 3 * per_unit
    generator = torch.Generator().manual_seed(1)
    words = random_like((layers, slots, width), dtype, 3)
    chosen = torch.randperm(slots, generator=generator)[: units * per_unit].to(DEVICE)
    # Bytes of other tensors lie between those of two units.
    shape = (units, layers * per_unit * width + 8)
    inner = (units, layers, per_unit, width)
    found, due = (torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2))
    parts = [memory[:, : shape[1] - 8].view(inner) for memory in (found, due)]
    sums = [torch.arange(len(chosen), device=DEVICE) for _ in range(2)]
    triton_rows.gather_rows(parts[0], sums[0], words, chosen, first_layer=2)
    gather_rows_ref(parts[1], sums[1], words, chosen, first_layer=2)
    assert torch.equal(found, due)
    assert torch.equal(*sums)
    some = torch.arange(0, len(chosen), 2, device=DEVICE)
    there, due = (random_like((layers, slots, width), dtype, 5) for _ in range(2))
    triton_rows.scatter_rows(there, chosen[some], parts[0], some)
    scatter_rows_ref(due, chosen[some], parts[0], some)
    assert torch.equal(there, due)


def test_swapped_slots_and_layers_show():
    tensor = random_like((2, 4, 8), torch.float32, 5)
    layout = UnitLayout(4, (SlotTensor("k", tensor),))
    memory = torch.zeros((1, layout.bytes_per_unit), dtype=torch.uint8, device=DEVICE)
    every = torch.arange(4, device=DEVICE)
    layout.gather(every, memory)
    part = layout.part(memory, 0)
    for swapped in (part.flip(1), part.flip(2), part.flip(3)):
        other = memory.clone()
        layout.part(other, 0).copy_(swapped.clone())
        assert not arrive(layout, other, every, every).is_intact.item()


def test_keys_name_the_whole_history():
    size = 4
    tokens = np.arange(12)
    keys = unit_keys(first_key(b"model", None), tokens, size)
    assert len(keys) == len(set(keys)) == 3
    assert unit_keys(first_key(b"model", None), tokens[:11], size) == keys[:2]
    for other in (first_key(b"model", "tenant"), first_key(b"other model", None)):
        assert not set(unit_keys(other, tokens, size)) & set(keys)
    tokens[0] = 99
    assert not set(unit_keys(first_key(b"model", None), tokens, size)) & set(keys)


@pytest.mark.parametrize(("page_size", "size"), [(1, 64), (48, 96), (64, 64), (96, 96)])
def test_a_unit_is_whole_pages(page_size, size):
    assert unit_tokens(page_size) == size


class TestHostPool:
    def test_the_end_of_a_sequence_goes_first(self):
        pool = HostPool(size=3, bytes_per_unit=8, is_pinned=False)
        for name, parent in (("a", ""), ("b", "a"), ("c", "b")):
            assert pool.add(name.encode(), parent.encode()) is not None
        pool.touch([b"a", b"b", b"c"])
        pool.add(b"d", b"")
        assert b"c" not in pool
        assert b"a" in pool
        assert pool.evicted == 1

    def test_pinned_units_stay(self):
        pool = HostPool(size=2, bytes_per_unit=8, is_pinned=False)
        pool.add(b"a", b"")
        pool.add(b"b", b"a")
        pool.pin([b"a", b"b"])
        assert pool.add(b"c", b"b") is None
        assert pool.drop([b"a"]) == 0
        pool.unpin([b"b"])
        assert pool.add(b"c", b"b") is not None
        assert b"a" in pool

    def test_what_continues_a_unit_is_found(self):
        pool = HostPool(size=5, bytes_per_unit=8, is_pinned=False)
        for name, parent in (("a", ""), ("b", "a"), ("c", "b"), ("x", "a"), ("y", "")):
            pool.add(name.encode(), parent.encode())
        assert pool.below([b"b"]) == {b"b", b"c"}
        assert pool.below([b"a"]) == {b"a", b"b", b"c", b"x"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
