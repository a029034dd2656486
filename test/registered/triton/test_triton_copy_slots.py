"""Copies of state slots: Triton's against the reference, and those of the pool."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.configs.state_config import DeltaShape
from sglang.srt.forward.state_plan import StateCopies
from sglang.srt.mem_cache.ops.copy_slots import op
from sglang.srt.mem_cache.ops.copy_slots import triton as kernels
from sglang.srt.mem_cache.state_pool import StatePool, StateShape
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count
from sglang.test.state_problem import Draws

register_cpu_ci(est_time=5, suite="cpu")
register_cuda_ci(est_time=15, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = range(count(ci=12, full=100) if DEVICE == "cpu" else 100)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]
SLOTS = 9


def random_bits(draws: Draws, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return elements of any bits, NaN and infinity included."""
    size = [*shape[:-1], shape[-1] * dtype.itemsize]
    return (256 * draws.uniform(*size)).to(torch.uint8).view(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = BITS[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_are_copied_bit_by_bit(seed: int) -> None:
    draws = Draws(seed, device=DEVICE)
    dtype = DTYPES[seed % len(DTYPES)]
    sizes = [draws.choice(1, 3, 8), draws.choice(1, 3, 16, 48), draws.choice(1, 3, 16)]
    # Slots with gaps between them, which start at any element.
    gap, offset = draws.choice(0, 1, 16), draws.choice(0, 1, 8)
    width = sizes[0] * sizes[1] * sizes[2]
    memory = random_bits(draws, [SLOTS * (width + gap) + offset], dtype)
    pool = memory[offset:].view(SLOTS, width + gap)[:, :width].unflatten(1, sizes)
    before, expected = memory.clone(), pool.clone()
    order = draws.slots(SLOTS - 1, SLOTS)
    copies = draws.integer(0, 5)
    dst, sources = order[:copies], order[copies:]
    src = sources[draws.longs([draws.integer(0, 2) for _ in range(copies)])]
    kernels.copy_slots(pool, dst=dst, src=src)
    op.copy_slots.reference(expected, dst=dst, src=src)
    assert same_bits(pool, expected)
    pool.copy_(before[offset:].view(SLOTS, width + gap)[:, :width].unflatten(1, sizes))
    assert same_bits(memory, before), "bytes between the slots were written"


def test_copies_of_slots_to_themselves_are_left_out() -> None:
    draws = Draws(3, device=DEVICE)
    for copy_slots in (kernels.copy_slots, op.copy_slots.reference):
        pool = random_bits(draws, [5, 24], torch.float32)
        expected = pool[[0, 1, 4, 3, 4]]
        copy_slots(pool, dst=draws.longs([0, 2, 0]), src=draws.longs([0, 4, 0]))
        assert same_bits(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_of_several_programs(dtype: torch.dtype) -> None:
    draws = Draws(1, device=DEVICE)
    width = 2 * kernels.MOST_LINES * kernels.LINE_BYTES // dtype.itemsize + 48
    pool = random_bits(draws, [4, width], dtype)
    assert kernels.line_size(pool) * dtype.itemsize == kernels.LINE_BYTES
    expected = pool[[0, 3, 2, 3]]
    kernels.copy_slots(pool, dst=draws.longs([1]), src=draws.longs([3]))
    assert same_bits(pool, expected)


def test_lines_are_aligned() -> None:
    memory = torch.zeros(4096, dtype=torch.float16)
    assert memory.data_ptr() % 16 == 0
    for pool, line in (
        (memory.view(4, 1024), 8),
        (memory.view(4, 1024)[:, :24], 8),
        (memory.view(4, 1024)[:, 2:26], 2),
        (memory[:4000].view(4, 1000)[:, :12], 4),
        (memory[:112].view(4, 28)[:, :24], 4),
        (memory[:404].view(4, 101), 1),
    ):
        assert kernels.line_size(pool) == line


def test_copies_that_overlap_or_have_gaps_are_refused() -> None:
    pool, slots = torch.zeros(5, 4, 6, device=DEVICE), Draws(0, device=DEVICE).longs
    with pytest.raises(ValueError, match=r"\[3\] are both dst and src"):
        op.copy_slots.reference(pool, dst=slots([1, 3]), src=slots([3, 2]))
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.copy_slots(pool.transpose(1, 2), dst=slots([1]), src=slots([2]))
    with pytest.raises(ValueError, match="src is torch.int64"):
        kernels.copy_slots(pool, dst=slots([1]), src=slots([2, 3]))


@pytest.mark.parametrize("heads", [0, 2])
def test_a_pool_copies_both_parts_of_a_slot(heads: int) -> None:
    draws = Draws(2, device=DEVICE)
    shape = StateShape(
        layers=(0, 3),
        conv_channels=6,
        conv_inputs=3,
        delta=DeltaShape(heads=heads, key_heads=1, d_k=8, d_v=4) if heads else None,
        dtype=torch.bfloat16,
        matrix_dtype=torch.float32,
    )
    pool = StatePool(shape, size=4, device=DEVICE)
    parts = [part for part in (pool.conv, pool.matrix) if part is not None]
    for part in parts:
        part.copy_(draws.normal(*part.shape))
    expected = [part[[0, 4, 2, 2, 4]] for part in parts]
    pool.copy(StateCopies(dst=draws.longs([3, 1]), src=draws.longs([2, 4])))
    for part, wanted in zip(parts, expected, strict=True):
        assert torch.equal(part, wanted)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
