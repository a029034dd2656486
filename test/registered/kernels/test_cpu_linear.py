"""The packed product on the CPU: against float64, and batch invariance bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kv_canary.op import force_reference, native_available
from sglang.srt.layers.ops.linear import op as linear
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

needs_native = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)
SHAPES = [(1, 1), (31, 7), (32, 64), (33, 320), (96, 100), (320, 321), (500, 40)]
ROWS = [0, 1, 2, 3, 5, 8, 12, 13, 16, 17, 31, 70]


def make(n: int, k: int, *, exact: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, exactly bfloat16 or not, and inputs for it."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    if exact:
        weight = weight.bfloat16().float()
    return weight, torch.randn(max(ROWS), k, generator=generator)


def assert_product(
    actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """Within the rounding of a float32 sum of |x| |w|."""
    expected = x.double() @ weight.double().t()
    bound = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        expected = expected + bias.double()
        bound = bound + bias.double().abs()
    error = (actual.double() - expected).abs()
    assert bool((error <= 1e-6 * bound + 1e-12).all()), float((error / bound).max())


@needs_native
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_matches_float64(
    level: str, shape: tuple[int, int], exact: bool
) -> None:
    n, k = shape
    weight, x = make(n, k, exact=exact)
    bias = torch.randn(n)
    packed = linear.pack_weight(weight)
    assert packed.data.dtype == (torch.bfloat16 if exact else torch.float32)
    for rows in ROWS:
        for b in (None, bias):
            out = linear.linear(x[:rows], packed, b)
            assert out.shape == (rows, n)
            assert_product(out, x[:rows], weight, b)


@needs_native
@pytest.mark.parametrize("exact", [True, False])
def test_a_row_does_not_depend_on_the_batch(level: str, exact: bool) -> None:
    """Bitwise, for every count of rows and of threads."""
    for n, k in ((33, 320), (320, 1376), (1000, 64)):
        weight, _ = make(n, k, exact=exact)
        x = torch.randn(300, k)
        packed = linear.pack_weight(weight)
        torch.set_num_threads(1)
        whole = linear.linear(x, packed)
        for threads, counts in ((1, (*ROWS, 100, 255, 300)), (2, (1, 16)), (5, (300,))):
            torch.set_num_threads(threads)
            for rows in counts:
                begin = (37 * rows) % (301 - rows)
                out = linear.linear(x[begin : begin + rows], packed)
                assert torch.equal(out, whole[begin : begin + rows])


@needs_native
def test_bfloat16_and_float32_storage_agree_bitwise(level: str) -> None:
    weight, x = make(65, 200, exact=True)
    narrow = linear.pack_weight(weight)
    panels = torch.nn.functional.pad(weight, (0, 0, 0, 31)).view(3, 32, 200)
    wide = linear.PackedWeight(
        n=65, k=200, panel=32, data=panels.transpose(1, 2).contiguous()
    )
    assert torch.equal(linear.linear(x, narrow), linear.linear(x, wide))


@pytest.mark.parametrize("exact", [True, False])
def test_unpack_returns_the_weight(exact: bool) -> None:
    weight, x = make(70, 33, exact=exact)
    packed = linear.pack_weight(weight)
    assert torch.equal(linear.unpack_weight(packed), weight)
    with force_reference():
        assert_product(linear.linear(x, packed), x, weight, None)
        fallback = linear.pack_weight(weight)
        assert torch.equal(linear.unpack_weight(fallback), weight)
        assert_product(linear.linear(x, fallback), x, weight, None)
    # A weight packed for the fallback stays usable when the kernels are there.
    assert_product(linear.linear(x, fallback), x, weight, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations(dtype: torch.dtype) -> None:
    weight, x = make(40, 64, exact=True)
    narrow = x.to(dtype)
    bias = torch.randn(40).to(dtype)
    packed = linear.pack_weight(weight.to(dtype))
    expected = (narrow.float() @ weight.to(dtype).float().t() + bias.float()).to(dtype)
    out = torch.empty_like(expected)
    for result in (
        linear.linear(narrow, packed, bias),
        linear.linear(narrow, packed, bias, out=out),
        linear.linear(narrow, weight.to(dtype), bias),
    ):
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_shapes_strides_and_out() -> None:
    weight, x = make(40, 64, exact=True)
    packed = linear.pack_weight(weight)
    whole = linear.linear(x[:12], packed)
    assert torch.equal(linear.linear(x[:12].view(2, 6, 64), packed).view(12, 40), whole)
    assert torch.equal(linear.linear(x[0], packed), whole[0])
    wide = torch.cat((x, x), dim=1)[:12, :64]
    out = torch.empty(12, 40)
    assert linear.linear(wide, packed, out=out) is out
    assert torch.equal(out, whole)


@needs_native
def test_nan_and_infinity_pass_through(level: str) -> None:
    weight, x = make(40, 64, exact=True)
    packed = linear.pack_weight(weight)
    x = x[:20].clone()
    x[3, 5] = float("nan")
    x[7, 0] = float("inf")
    out = linear.linear(x, packed)
    assert bool(out[3].isnan().all())
    assert not bool(out[7].isfinite().any())
    assert bool(out[[0, 1, 2, 4, 19]].isfinite().all())
    weight[9, 9] = float("nan")
    out = linear.linear(x[:1], linear.pack_weight(weight))
    assert bool(out[0, 9].isnan()) and int(out.isnan().sum()) == 1


def test_bad_weights_are_refused() -> None:
    for bad in (
        torch.zeros(3),
        torch.zeros(3, 4, dtype=torch.int64),
        torch.zeros(0, 4),
    ):
        with pytest.raises(ValueError, match="pack_weight: got"):
            linear.pack_weight(bad)


@needs_native
def test_bad_arguments_raise() -> None:
    weight, x = make(40, 64, exact=True)
    packed = linear.pack_weight(weight)
    with pytest.raises(RuntimeError, match="packed_linear: weight is"):
        linear.linear(x[:, :63], packed)
    with pytest.raises(RuntimeError, match="packed_linear: out is"):
        linear.linear(x, packed, out=torch.empty(3, 3))
    with pytest.raises(RuntimeError, match="packed_linear: bias is"):
        linear.linear(x, packed, torch.zeros(39))
    with pytest.raises(RuntimeError, match="packed_linear: x is"):
        linear.linear(x[:64].t(), packed)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
