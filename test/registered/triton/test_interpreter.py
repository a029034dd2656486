"""What the tests' interpreter does in another way than Triton's comes to the same."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

ROWS, COLUMNS = 4, 8


@triton.jit
def add_and_max(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit
def first_and_last(a, b, c, d):
    return a, d


@triton.jit
def reduce_kernel(
    x,
    sums,
    most,
    ends,
    AXIS: tl.constexpr,
    KEEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    index = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x + index)
    rest: tl.constexpr = COLUMNS if AXIS == 0 else ROWS
    to = tl.arange(0, rest)
    added, largest = tl.reduce((values, values), AXIS, add_and_max, keep_dims=KEEPS)
    first, last = tl.reduce((values, values), AXIS, first_and_last, keep_dims=KEEPS)
    tl.store(sums + to, tl.reshape(added, (rest,)))
    tl.store(most + to, tl.reshape(largest, (rest,)))
    tl.store(ends + to, tl.reshape(first, (rest,)))
    tl.store(ends + rest + to, tl.reshape(last, (rest,)))


@triton.jit
def add_kernel(x, y, out, NUMBER: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, tl.load(x + index) + tl.load(y + index) + NUMBER)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_combination_of_ones_own(axis: int, keeps: bool) -> None:
    """In order, and in the type of its operands, where sums wrap around."""
    x = torch.randint(-(2**31), 2**31 - 1, (ROWS, COLUMNS)).int()
    rest = x.shape[1 - axis]
    sums, most, ends = (x.new_zeros(count, rest) for count in (1, 1, 2))
    reduce_kernel[(1,)](x, sums, most, ends, axis, keeps, ROWS, COLUMNS)
    assert torch.equal(sums[0], x.sum(axis, dtype=torch.int32))
    assert torch.equal(most[0], x.amax(axis))
    assert torch.equal(ends, torch.stack((x.select(axis, 0), x.select(axis, -1))))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float32])
@pytest.mark.parametrize("other", [torch.int8, torch.int64, torch.float32])
@pytest.mark.parametrize("number", [3, -100, 0.5])
def test_types_are_promoted(
    dtype: torch.dtype, other: torch.dtype, number: float
) -> None:
    x, y = torch.arange(-8, 8).to(dtype), torch.arange(16).to(other)
    out = torch.zeros(16, dtype=torch.float64)
    add_kernel[(1,)](x, y, out, number, 16)
    assert torch.equal(out, (x + y + number).double())


def test_a_number_out_of_range_is_refused() -> None:
    x = torch.arange(16, dtype=torch.uint8)
    with pytest.raises(InterpreterError):
        add_kernel[(1,)](x, x, x, -1, 16)


def test_bfloat16_is_widened_exactly() -> None:
    """Denormals, infinities and NaN among them."""
    every = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)
    out = torch.zeros(2**16)
    add_kernel[(1,)](every, torch.zeros(2**16), out, 0.0, 2**16)
    torch.testing.assert_close(out, every.float(), rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
