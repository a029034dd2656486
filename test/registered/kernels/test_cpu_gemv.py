"""The product of few rows with a half-precision weight as the checkpoint has it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kv_canary.op import native_available
from sglang.srt.layers.ops.linear import op as linear
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)
SHAPES = [(1, 1), (3, 7), (4, 32), (33, 31), (40, 100), (320, 321), (1001, 64)]
ROWS = 13
DTYPES = [torch.bfloat16, torch.float16]
NARROWING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def make(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    shapes = ((n, k), (ROWS, k), (n,))
    weight, x, bias = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return weight, x, bias


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from sglang_kernels import ops

    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype)
    ops.plain_linear(x, weight, bias, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_matches_float64(
    level: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, x, bias = make(*shape, dtype)
    for b in (None, bias):
        actual = product(x, weight, b).double()
        expected = x.double() @ weight.double().t()
        bound = x.double().abs() @ weight.double().abs().t()
        if b is not None:
            expected = expected + b.double()
            bound = bound + b.double().abs()
        # A float32 sum, rounded once.
        allowed = 1e-6 * bound + NARROWING[dtype] * expected.abs() + 1e-7
        assert bool(((actual - expected).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_depends_on_neither_batch_nor_threads(
    level: str, dtype: torch.dtype
) -> None:
    for n, k in ((33, 320), (2000, 100)):
        weight, x, _ = make(n, k, dtype)
        torch.set_num_threads(1)
        whole = product(x, weight)
        for threads, counts in ((1, range(ROWS)), (2, (1, 4, 13)), (5, (3,))):
            torch.set_num_threads(threads)
            for rows in counts:
                begin = (5 * rows) % (ROWS + 1 - rows)
                part = product(x[begin : begin + rows], weight)
                assert torch.equal(part, whole[begin : begin + rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_take_it_for_few_rows_only(dtype: torch.dtype) -> None:
    """More rows are torch's, whose rounding differs in some of 320 outputs."""
    from sglang.srt.layers.ops.linear.native import FEW_ROWS

    weight, x, bias = make(320, 321, dtype)
    out = torch.empty(FEW_ROWS, 320, dtype=dtype)
    few = x[:FEW_ROWS]
    assert linear.linear(few, weight, bias, out=out) is out
    assert torch.equal(out, product(few, weight, bias))
    assert torch.equal(linear.linear(few[0], weight, bias), out[0])
    halves = linear.linear(few.view(2, FEW_ROWS // 2, 321), weight, bias)
    assert torch.equal(halves.view(FEW_ROWS, 320), out)
    assert torch.equal(linear.linear(x, weight), linear.linear_ref(x, weight))
    slanted = weight.t().contiguous().t()
    assert torch.equal(linear.linear(few, slanted), linear.linear_ref(few, slanted))
    wide = torch.cat((few, few), dim=1)[:, :321]
    assert torch.equal(linear.linear(wide, weight, bias), out)
    assert linear.linear(x[:0], weight).shape == (0, 320)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_in_its_row(level: str, dtype: torch.dtype) -> None:
    weight, x, _ = make(33, 71, dtype)
    expected = product(x, weight)
    x[2, 70] = torch.nan
    result = product(x, weight)
    assert bool(result[2].isnan().all())
    rest = [row for row in range(ROWS) if row != 2]
    assert torch.equal(result[rest], expected[rest])


def test_bad_arguments_raise() -> None:
    weight, x, bias = make(33, 71, torch.bfloat16)
    for bad in (
        lambda: product(x.float(), weight),
        lambda: product(x[:, :70], weight),
        lambda: product(x, weight.half()),
        lambda: product(x, weight.t()),
        lambda: product(x, weight, bias.float()),
        lambda: product(x, weight, bias[:-1]),
    ):
        with pytest.raises(RuntimeError, match="plain_linear"):
            bad()
