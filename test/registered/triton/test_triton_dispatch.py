"""The op layer takes the Triton kernels on CUDA tensors, and only there."""

from __future__ import annotations

import pytest
import torch

from kv_canary.op import force_reference, triton_available
from sglang.srt.layers.ops.activation import op as activation
from sglang.srt.layers.ops.linear import op as linear
from sglang.srt.layers.ops.norm import op as norm
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_cpu_tensors_never_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    kernels = "sglang.srt.layers.ops.norm.triton.rmsnorm"
    monkeypatch.setattr(kernels, lambda *_, **__: pytest.fail("a Triton launch"))
    x = torch.randn(2, 8)
    assert norm.rmsnorm(x, torch.ones(8), 1e-6).shape == x.shape


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("name", activation.GATED)
def test_linear_gated_is_its_two_parts(name: str, rows: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(rows, 4096, device=device).to(dtype)
    weight = (torch.randn(512, 4096, device=device) / 64).to(dtype)
    expected = activation.GATED[name](linear.linear_ref(x, weight))
    actual = linear.linear_gated(x, weight, name)
    tolerance = 3e-2 if device == "cuda" else 1e-4
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 16, 70, 1100])
def test_linear_add_changes_the_residual_in_place(rows: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(rows, 1408, device=device).to(dtype)
    weight = (torch.randn(1024, 1408, device=device) / 32).to(dtype)
    residual = torch.randn(rows, 1024, device=device).to(dtype)
    expected = residual.double() + x.double() @ weight.double().t()
    assert linear.linear_add(x, weight, residual) is residual
    tolerance = 6e-2 if device == "cuda" else 1e-4
    torch.testing.assert_close(
        residual.double(), expected, rtol=tolerance, atol=tolerance
    )


@needs_cuda
def test_cuda_tensors_go_to_triton_unless_forced() -> None:
    x = torch.randn(2, 64, device="cuda")
    weight = torch.ones(64, device="cuda")
    assert triton_available()
    fast = norm.rmsnorm(x, weight, 1e-6)
    with force_reference():
        assert not triton_available()
        torch.testing.assert_close(fast, norm.rmsnorm(x, weight, 1e-6))


@needs_cuda
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 64, 65])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (2048, 1024)])
def test_linear_whatever_the_table_says(rows: int, shape: tuple[int, int]) -> None:
    n, k = shape
    x = torch.randn(rows, k, device="cuda").bfloat16()
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()
    bias = torch.randn(n, device="cuda").bfloat16()
    expected = x.double() @ weight.double().t() + bias.double()
    for out in (None, torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)):
        actual = linear.linear(x, weight, bias, out=out)
        assert float((actual - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("rows", [1, 3, 1023, 1024, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_into_adds_or_leaves_it_to_the_caller(
    rows: int, dtype: torch.dtype
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, 64, device=device).to(dtype)
    weight = (torch.randn(96, 64, device=device) / 8).to(dtype)
    residual = torch.randn(rows, 96, device=device).to(dtype)
    expected = residual.double() + x.double() @ weight.double().t()
    pending = linear.linear_into(x, weight, None, residual)
    assert (pending is None) == (device == "cuda" and rows >= linear.ADD_ROWS)
    found = residual if pending is None else residual + pending
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
