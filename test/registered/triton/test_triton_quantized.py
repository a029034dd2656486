"""Products with quantised weights against float32 products of their values.

Without a GPU the kernels run in the interpreter, in float16, which multiplies bfloat16
wrongly; `torch._scaled_mm` needs a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.linear import triton as gemm
from sglang.srt.layers.ops.linear import triton_many as many
from sglang.srt.layers.ops.linear.op import linear_ref
from sglang.srt.layers.ops.linear.quantized import (
    E2M1,
    E4M3_MAX,
    QuantizedWeight,
    dequantize,
    in_runs,
    quantize_rows,
)
from sglang.srt.layers.ops.linear.triton_table import GemmConfig
from sglang.srt.layers.ops.moe import triton as moe_triton
from sglang.srt.layers.ops.moe.op import ExpertWeights
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.moe_problem import oracle, random_choice

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
DTYPE = torch.float16 if DEVICE == "cpu" else torch.bfloat16
# Half of the last place of the result, and the roundings of its sum.
TOLERANCE = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[DTYPE] * 1.1
SHAPES = [(70, 200)]
if DEVICE == "cuda":
    SHAPES += [(128, 256), (6144, 4096), (1536, 7168)]
ROWS = [1, 17, 64, 65, 130] if DEVICE == "cuda" else [1, 65]
CONFIGS = [
    GemmConfig(block_n=64, block_k=64, split_k=1, stages=2, prefetch=1),
    GemmConfig(block_n=32, block_k=64, split_k=3, stages=3),
]
GEMV = GemmConfig(block_n=4, block_k=128, split_k=0)
SCHEMES = {
    "row": ("e4m3", 1, None),
    "blocks": ("e4m3", 128, 128),
    "groups": ("e4m3", 1, 64),
    "int4-row": ("int4", 1, None),
    "int4": ("int4", 1, 64),
    "int4-zeros": ("int4-zeros", 1, 32),
    "mxfp4": ("mxfp4", 1, 32),
}


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(11)


def quantized(
    n: int, k: int, form: str, rows: int, columns: int | None, **fields: Any
) -> QuantizedWeight:
    """Random codes, with scales that differ by powers of ten."""
    groups = -(-k // (columns or k))
    shape = (-(-n // rows), groups)
    zeros = None
    if form == "e4m3":
        codes, _ = quantize_rows(torch.randn(n, k))
        scales = 10 ** (torch.rand(*shape) * 2 - 4)
    else:
        codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
        scales = 10 ** (torch.rand(*shape) * 2 - 2)
    if form == "mxfp4":
        scales = torch.randint(117, 125, shape, dtype=torch.uint8)
    if form == "int4-zeros":
        form, zeros = "int4", torch.randint(-8, 9, shape, dtype=torch.int8).to(DEVICE)
    weight = QuantizedWeight(
        format=form,  # type: ignore[arg-type]
        codes=codes.to(DEVICE),
        scales=scales.to(DEVICE),
        zeros=zeros,
        group_rows=rows,
        group_columns=columns or k,
        **fields,
    )
    # Symmetric ones stay as checkpoints have them.
    return weight if form == "int4" and zeros is None else in_runs(weight)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of the worst row, whose outputs have scales of many sizes."""
    assert actual.shape == expected.shape and bool(actual.isfinite().all())
    difference = (actual.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1)).max())


def values(weight: QuantizedWeight) -> Tensor:
    return dequantize(weight).double()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"split{c.split_k}")
def test_few_rows(config: GemmConfig, scheme: str) -> None:
    for n, k in SHAPES:
        weight = quantized(n, k, *SCHEMES[scheme])
        if not weight.is_scaled_by_row:
            step = min(config.block_k, weight.group_columns)
            config = dataclasses.replace(config, block_k=step)
        for rows in (1, 33):
            x = torch.randn(rows, k, device=DEVICE).to(DTYPE)
            found = gemm.gemm(x, weight, config=config)
            assert relative_error(found, x.double() @ values(weight).T) < TOLERANCE


def test_one_row_in_registers() -> None:
    for n, k in SHAPES:
        weight = quantized(n, k, *SCHEMES["row"])
        x = torch.randn(1, k, device=DEVICE).to(DTYPE)
        found = gemm.gemm(x, weight, config=GEMV)
        assert relative_error(found, x.double() @ values(weight).T) < TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES)
def test_epilogues(scheme: str) -> None:
    weight = quantized(72, 200, *SCHEMES[scheme])
    x = torch.randn(3, 200, device=DEVICE).to(DTYPE)
    bias = torch.randn(72, device=DEVICE).to(DTYPE)
    residual = torch.randn(3, 72, device=DEVICE).to(DTYPE)
    product = (x.double() @ values(weight).T).to(DTYPE)
    configs = [dataclasses.replace(each, block_k=32) for each in CONFIGS]
    expected = (x.double() @ values(weight).T + bias).to(DTYPE) + residual
    found = gemm.gemm(x, weight, bias, config=configs[0], residual=residual)
    assert relative_error(found, expected) < 2 * TOLERANCE
    for name, activation in GATED.items():
        gated = gemm.gemm_gated(x, weight, name, config=configs[1])
        assert relative_error(gated, activation(product.float())) < 4 * TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", ROWS)
def test_the_op_takes_any_number_of_rows(rows: int, scheme: str) -> None:
    n, k = SHAPES[0]
    weight = quantized(n, k, *SCHEMES[scheme])
    x = torch.randn(rows, k, device=DEVICE).to(DTYPE)
    for bias in (None, torch.randn(n, device=DEVICE).to(DTYPE)):
        expected = x.double() @ values(weight).T + (0 if bias is None else bias)
        canvas = torch.full((rows + 1, n), 7.0, dtype=DTYPE, device=DEVICE)
        assert gemm.linear(x, weight, bias, out=canvas[:rows]) is not None
        # Many rows are multiplied with values rounded to the dtype.
        assert relative_error(canvas[:rows], expected) < 2 * TOLERANCE
        assert bool((canvas[rows] == 7).all())


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
def test_every_code_of_4_bits(form: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scales = torch.tensor([[0.5], [4.0]])
    if form == "mxfp4":
        scales = torch.tensor([[120], [130]], dtype=torch.uint8)
    weight = QuantizedWeight(
        format=form,  # type: ignore[arg-type]
        codes=codes.to(DEVICE),
        scales=scales.to(DEVICE),
        group_rows=1,
        group_columns=256,
    )
    table = E2M1 if form == "mxfp4" else range(-8, 8)
    halves = [table[half] for byte in range(256) for half in (byte & 15, byte >> 4)]
    if form == "mxfp4":
        scales = torch.tensor([[2.0**-7], [2.0**3]])
    expected = torch.tensor(halves).view(2, 256).double() * scales
    assert torch.equal(dequantize(weight).double().cpu(), expected)
    assert torch.equal(many.dequantize_to(weight, DTYPE).double().cpu(), expected)


def test_inputs_in_another_order() -> None:
    """The columns of GPTQ's act-order."""
    order = torch.randperm(200, device=DEVICE)
    weight = quantized(72, 200, *SCHEMES["int4-zeros"])
    turned = dataclasses.replace(weight, columns=order)
    for rows in (2, 70):
        x = torch.randn(rows, 200, device=DEVICE).to(DTYPE)
        expected = gemm.linear(x[:, order].contiguous(), weight)
        assert torch.equal(gemm.linear(x, turned), expected)
        plain = linear_ref(x, turned)
        assert relative_error(plain, expected) < 2 * TOLERANCE


def test_plain_values_are_exact() -> None:
    """Every code, in both forms, with powers of two as scales."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes[codes & 0x7F == 0x7F] = 0  # not a number
    weight = QuantizedWeight(
        format="e4m3",
        codes=codes.view(torch.float8_e4m3fn).to(DEVICE),
        scales=torch.tensor([[0.25], [2.0]], device=DEVICE),
        group_rows=1,
        group_columns=128,
    )
    expected = codes.view(torch.float8_e4m3fn).double() * torch.tensor([[0.25], [2.0]])
    assert torch.equal(many.dequantize_to(weight, DTYPE).double().cpu(), expected)


@pytest.mark.parametrize("group", [200, 128, 64])
def test_rounding_rows(group: int) -> None:
    x = torch.randn(5, 200, device=DEVICE).to(DTYPE)
    x[1] = 0
    x[2, 3] = 30000.0
    codes, scales = many.round_rows(x[:, :], group)
    expected_codes, expected_scales = quantize_rows(x, group)
    torch.testing.assert_close(scales, expected_scales, rtol=2**-22, atol=0.0)
    found, expected = codes.float(), expected_codes.float()
    if DEVICE == "cpu":
        # The interpreter forgets to carry where a mantissa is rounded up to 2, and
        # cuts small numbers off.
        found = torch.where(
            (2 * found == expected) | (found.abs() < 2), expected, found
        )
    # Values at the middle of two codes may go either way after another division.
    assert (found != expected).float().mean() < 0.01
    assert bool(((found - expected).abs() <= found.abs() * 2**-3 + 2**-9).all())
    assert float(codes.float().abs().max()) == E4M3_MAX


@needs_cuda
@pytest.mark.parametrize("group", [200, 64])
def test_rounded_rows_keep_nan(group: int) -> None:
    """The interpreter writes no NaN of this type."""
    x = torch.randn(5, 200, device=DEVICE).to(DTYPE)
    x[2, 3] = float("nan")
    codes, scales = many.round_rows(x, group)
    assert torch.equal(codes.float().isnan(), x.isnan())
    assert bool(scales.isfinite().all())


@pytest.mark.parametrize("rows", [1, 130] if DEVICE == "cuda" else [3])
def test_products_of_blocks_in_8_bits(rows: int) -> None:
    """The rounding of the inputs is part of the oracle, so it is exact up to sums."""
    shapes = [(144, 320)] if DEVICE == "cpu" else [*SHAPES, (144, 336)]
    for n, k in shapes:
        weight = quantized(n, k, *SCHEMES["blocks"])
        x = torch.randn(rows, k, device=DEVICE).to(DTYPE)
        codes, scales = many.round_rows(x, 128)
        wide = scales.repeat_interleave(128, 1)[:, :k]
        expected = (codes.double() * wide.double()) @ values(weight).T
        out = torch.empty(rows, n, dtype=DTYPE, device=DEVICE)
        many.multiply_blocks(x, weight, None, out)
        assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts(tokens: int, scheme: str) -> None:
    experts, hidden, inner = 5, 200, 144
    gate_up = [quantized(2 * inner, hidden, *SCHEMES[scheme]) for _ in range(experts)]
    down = [quantized(hidden, inner, *SCHEMES[scheme]) for _ in range(experts)]
    weights = ExpertWeights(gate_up=stack(gate_up), down=stack(down), inner=inner)
    x = torch.randn(tokens, hidden, device=DEVICE).to(DTYPE)
    share, ids = random_choice(tokens, experts, 2, device=DEVICE)
    found = moe_triton.moe_experts(x, share, ids.to(DEVICE), weights)
    plain = ExpertWeights(
        gate_up=dequantize(weights.gate_up),
        down=dequantize(weights.down),
        inner=inner,
    )
    expected = oracle(x.float(), share, ids.to(DEVICE), plain)
    # The activations are rounded once more than the results.
    assert relative_error(found.cpu(), expected) < 3 * TOLERANCE


def stack(matrices: list[QuantizedWeight]) -> QuantizedWeight:
    """With smaller scales, because activations are products of two sums."""
    scales = torch.stack([each.scales for each in matrices])
    zeros = [each.zeros for each in matrices if each.zeros is not None]
    return dataclasses.replace(
        matrices[0],
        codes=torch.stack([each.codes for each in matrices]),
        scales=scales - 3 if scales.dtype == torch.uint8 else scales / 8,
        zeros=torch.stack(zeros) if zeros else None,
    )


@needs_cuda
def test_products_of_rows_in_8_bits() -> None:
    for n, k in ((6144, 4096), (4096, 14336)):
        weight = quantized(n, k, *SCHEMES["row"], quantizes_inputs=True)
        x = torch.randn(300, k, device=DEVICE).to(DTYPE)
        codes, scales = many.round_rows(x, k)
        expected = (codes.double() * scales.double()) @ values(weight).T
        # cuBLAS adds 8-bit products with 14 bits in its fast mode.
        assert relative_error(gemm.linear(x, weight), expected) < TOLERANCE + 2**-8


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
