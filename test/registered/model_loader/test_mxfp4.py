"""MXFP4: every code and scale, transformers' own conversion, and files that lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization_config import (
    QuantizationConfig,
    WeightScheme,
)
from sglang.srt.layers.moe.experts import Experts, StackLayout
from sglang.srt.layers.ops.linear.quantized import QuantizedWeight, dequantize
from sglang.srt.layers.quantization import quantized_modules, quantized_weight
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.quantized import QuantizedTensors, Readers
from sglang.srt.model_loader.weight_utils import TensorHeader
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=5, suite="cpu")

# Sign, two bits of exponent, one of mantissa.
CODES = {
    0b0000: 0.0,
    0b0001: 0.5,
    0b0010: 1.0,
    0b0011: 1.5,
    0b0100: 2.0,
    0b0101: 3.0,
    0b0110: 4.0,
    0b0111: 6.0,
    0b1000: -0.0,
    0b1001: -0.5,
    0b1010: -1.0,
    0b1011: -1.5,
    0b1100: -2.0,
    0b1101: -3.0,
    0b1110: -4.0,
    0b1111: -6.0,
}
DTYPES = [torch.float32, torch.bfloat16]
SCHEME = WeightScheme(
    format="mxfp4", group_columns=32, quantizes_inputs=False, is_kept_on_cpu=False
)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    weight = QuantizedWeight(
        format="mxfp4",
        codes=blocks.flatten(-2),
        scales=scales,
        group_rows=1,
        group_columns=32,
    )
    return dequantize(weight).to(dtype)


def read(
    tensors: dict[str, Tensor], *, is_kept: bool, transposed: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    headers = {
        name: TensorHeader("U8" if tensor.dtype == torch.uint8 else "F32", ())
        for name, tensor in tensors.items()
    }
    config = QuantizationConfig(method="mxfp4", weights=SCHEME)
    readers = Readers(
        is_kept=lambda name: is_kept,
        is_transposed=lambda name: transposed,
        dtype=dtype,
        device="cpu",
    )
    found = QuantizedTensors.find(headers, config, "folder")
    return dict(found.read(tensors.items(), readers))


def random_pair(*shape: int) -> tuple[Tensor, Tensor]:
    """Blocks [*shape, 16] and scales [*shape] of usual sizes."""
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 135, shape, dtype=torch.uint8)


def bits(values: Tensor) -> Tensor:
    """For comparisons that tell -0 from 0."""
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_with_every_scale(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, -1, -1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 16)
    found = dequantize_mxfp4(blocks, scales, dtype)
    pairs = [v for byte in range(256) for v in (CODES[byte & 15], CODES[byte >> 4])]
    expected = torch.tensor(pairs, dtype=torch.float64)[None] * torch.tensor(
        [2.0 ** (scale - 127) for scale in range(255)], dtype=torch.float64
    ).unsqueeze(1)
    assert found.shape == (255, 512)
    assert torch.equal(bits(found), bits(expected.float().to(dtype)))
    finite = expected.abs() <= torch.finfo(dtype).max
    assert torch.equal(found.double()[finite], expected[finite])  # exact


def test_the_scale_that_is_no_number() -> None:
    blocks, scales = random_pair(3, 2)
    scales[1, 0] = 255
    found = dequantize_mxfp4(blocks, scales, torch.bfloat16)
    assert bool(found[1, :32].isnan().all())
    assert not bool(found[1, 32:].isnan().any()) and not bool(found[0].isnan().any())
    tensors = {"a_blocks": blocks, "a_scales": scales}
    with pytest.raises(
        ValueError, match="folder: tensor a_scales holds a scale of nan"
    ):
        read(tensors, is_kept=True, transposed=False, dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_transformers_does(dtype: torch.dtype) -> None:
    blocks, scales = random_pair(3, 10, 4)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    weights = {"a.x_scales": scales, "b": torch.ones(2), "a.x_blocks": blocks}
    found = read(weights, is_kept=False, transposed=True, dtype=dtype)
    assert found.keys() == {"a.x", "b"}
    assert torch.equal(found["a.x"], expected)


@pytest.mark.parametrize("is_kept", [False, True])
def test_experts_take_it(is_kept: bool) -> None:
    """Rows of gate and up alternate in the blocks."""
    with quantized_modules(SCHEME if is_kept else None):
        experts = Experts(
            num_experts=3,
            hidden_size=64,
            intermediate_size=32,
            layout=StackLayout(is_transposed=True, is_interleaved=True),
        )
    blocks, scales = random_pair(3, 64, 2)
    weights = {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}
    found = read(weights, is_kept=is_kept, transposed=True, dtype=torch.float32)
    for name, stack in found.items():
        getattr(experts, name).load(name, stack, None)
    if is_kept:
        kept = quantized_weight(experts, "gate_up_proj")
        assert kept is not None and kept.nbytes == blocks.nbytes + scales.nbytes
        made = dequantize(kept)
    else:
        made = experts.gate_up_proj.data
    plain = dequantize_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(made, torch.cat((plain[:, ::2], plain[:, 1::2]), 1))


# -- files -------------------------------------------------------------------------

NAME = "model.layers.0.mlp.down_proj.weight"


def quantised_model(folder: Path) -> tuple[Path, dict[str, Tensor], Tensor]:
    """A checkpoint with one matrix in MXFP4, its tensors, and that matrix."""
    write_tiny_model(folder, "LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    del weights[NAME]
    blocks, scales = random_pair(64, 3)
    weights |= {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}
    return folder, weights, dequantize_mxfp4(blocks, scales, torch.bfloat16)


def load(folder: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(
        ModelConfig.from_path(folder),
        load_format="auto",
        dtype=torch.bfloat16,
        rope_rows=32,
    )
    return {name: p.data for name, p in model.named_parameters()}


def test_a_checkpoint(tmp_path: Path) -> None:
    folder, weights, expected = quantised_model(tmp_path)
    assert torch.equal(load(folder, weights)[NAME], expected)


def test_files_that_lie(tmp_path: Path) -> None:
    folder, weights, _ = quantised_model(tmp_path)
    blocks, scales = weights[f"{NAME}_blocks"], weights[f"{NAME}_scales"]
    for bad_blocks, bad_scales in (
        (blocks[:, :2].contiguous(), scales),
        (blocks[..., :8].contiguous(), scales),
        (blocks, scales.int()),
        (blocks.flatten(1), scales),
        (blocks[0].clone(), scales[0].clone()),
    ):
        lying = {f"{NAME}_blocks": bad_blocks, f"{NAME}_scales": bad_scales}
        with pytest.raises(ValueError, match=f"{NAME}_blocks is .*expected uint8"):
            load(folder, weights | lying)
    for suffix, message in (
        ("_blocks", f"tensor {NAME}_scales has no place"),
        ("_scales", f"{NAME}_blocks is quantised .U8., but there is no {NAME}_scales"),
    ):
        half = {k: v for k, v in weights.items() if k != NAME + suffix}
        with pytest.raises(ValueError, match=message):
            load(folder, half)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
