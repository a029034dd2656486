"""Properties of stored weights: their forms agree, and rounding is bounded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kv_canary.op import force_reference, native_available
from sglang.srt.layers.ops.linear.op import linear
from sglang.srt.layers.ops.linear.quantized import (
    FORMATS,
    QuantizedPanels,
    QuantizedWeight,
    dequantize,
    in_runs,
    pack_nibbles,
    quantize_rows,
    unpack_nibbles,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.quantized_models import FOUR_BITS, RECIPES, quantize_folder
from sglang.test.scale import count
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=3, suite="cpu")

EXAMPLES = settings(max_examples=count(ci=30, full=1000), deadline=None)


@st.composite
def weights(draw: st.DrawFn) -> QuantizedWeight:
    """Matrices of every format, with groups that may end beyond the last column."""
    form = draw(st.sampled_from(sorted(FORMATS)))
    n = draw(st.integers(1, 70))
    k = 2 * draw(st.integers(1, 60))
    rows = draw(st.sampled_from([1, 1, 4, 32]))
    columns = draw(st.one_of(st.just(k), st.integers(1, k)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    shape = (-(-n // rows), -(-k // columns))
    codes = torch.randint(
        256, (n, k // FORMATS[form].per_item), dtype=torch.uint8, generator=generator
    )
    codes[(codes & 0x7F) == 0x7F] = 0  # not a number in e4m3
    scales = torch.rand(shape, generator=generator) + 0.1
    if form == "mxfp4":
        scales = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
    zeros = None
    if form == "int4" and rows == 1 and draw(st.booleans()):
        zeros = torch.randint(-8, 9, shape, generator=generator).to(torch.int8)
    columns_of = None
    if draw(st.booleans()):
        columns_of = torch.randperm(k, generator=generator)
    return QuantizedWeight(
        format=form,
        codes=codes.view(FORMATS[form].dtype),
        scales=scales,
        group_rows=rows,
        group_columns=columns,
        zeros=zeros,
        columns=columns_of,
    )


@EXAMPLES
@given(weights())
def test_panels_hold_the_same_values(weight: QuantizedWeight) -> None:
    panels = QuantizedPanels.pack(weight)
    assert torch.equal(dequantize(panels), dequantize(weight))
    assert (panels.n, panels.k) == tuple(weight.shape)


@EXAMPLES
@given(weights(), st.integers(1, 6), st.booleans())
def test_products_are_those_of_the_values(
    weight: QuantizedWeight, rows: int, has_bias: bool
) -> None:
    """In every form and implementation; float32 sums of k terms in any order."""
    n, k = weight.shape
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
    bias = torch.linspace(-1, 1, n) if has_bias else None
    values = dequantize(weight).double()
    ordered = x if weight.columns is None else x[:, weight.columns]
    expected = ordered.double() @ values.T + (0 if bias is None else bias)
    bound = k * 2.0**-23 * (ordered.abs().double() @ values.abs().T + 1)
    for form in (weight, QuantizedPanels.pack(weight)):
        found = linear(x, form, bias)
        assert bool(((found.double() - expected).abs() <= bound).all())
        with force_reference():
            found = linear(x, form, bias)
        assert bool(((found.double() - expected).abs() <= bound).all())


@pytest.mark.skipif(not native_available(), reason="native kernels not built")
@EXAMPLES
@given(weights())
def test_a_row_does_not_depend_on_the_others(weight: QuantizedWeight) -> None:
    panels = QuantizedPanels.pack(weight)
    x = torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(1))
    whole = linear(x, panels)
    for row in range(9):
        assert torch.equal(linear(x[row : row + 1], panels)[0], whole[row])


@EXAMPLES
@given(
    st.lists(st.floats(-1e6, 1e6, width=32, allow_nan=False), min_size=1, max_size=40),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_rounding_is_bounded(values: list[float], group: int | None) -> None:
    row = torch.tensor([values])
    codes, scales = quantize_rows(row, group)
    size = min(group or len(values), len(values))
    wide = scales.repeat_interleave(size, dim=1)[:, : len(values)]
    error = (codes.float() * wide - row).abs()
    # Half a step of a normal number, or of the smallest ones, and the division.
    bound = torch.maximum(row.abs() * 2.0**-4, wide * 2.0**-10) * (1 + 2.0**-20)
    assert bool((error <= bound).all()) and bool(codes.float().isfinite().all())


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), min_size=1))
def test_halves_of_bytes(pairs: list[tuple[int, int]]) -> None:
    codes = [half for pair in pairs for half in pair]
    packed = pack_nibbles(torch.tensor([codes], dtype=torch.uint8))
    assert (FORMATS["int4"].decode(packed)[0] + 8).tolist() == codes


@EXAMPLES
@given(weights())
def test_longer_runs_keep_the_values(weight: QuantizedWeight) -> None:
    """In the order of kernels, and in panels made of it."""
    expected = dequantize(weight)
    turned = in_runs(dataclasses.replace(weight, codes=weight.codes.clone()))
    assert torch.equal(dequantize(turned), expected)
    assert torch.equal(dequantize(QuantizedPanels.pack(turned)), expected)


@pytest.mark.parametrize("run", [1, 4, 16])
def test_runs_of_halves(run: int) -> None:
    codes = torch.randint(16, (3, 64), dtype=torch.uint8)
    packed = pack_nibbles(codes, run)
    assert torch.equal(unpack_nibbles(packed, run), codes)
    assert packed[1, run] == codes[1, 2 * run] | (codes[1, 3 * run] << 4)


@pytest.mark.parametrize("name", [*RECIPES, *FOUR_BITS])
def test_weights_of_zero_have_a_scale(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "plain", "LlamaForCausalLM", hidden_size=64)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][:] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    made = quantize_folder(folder, tmp_path / "made", (RECIPES | FOUR_BITS)[name])
    stored = load_file(made / "model.safetensors")
    scales = {key: value for key, value in stored.items() if "scale" in key}
    assert scales and all(bool((value > 0).all()) for value in scales.values())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
