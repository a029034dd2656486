"""Models with weights of 4 bits against the plain models with exactly their values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_fp8_models import TOLERANCE, count_quantised, load, logits, pairs
from torch import Tensor

from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    tensor_parallel_group,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.quantized_models import FOUR_BITS, Recipe, is_linear, quantize_folder
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=6, suite="cpu")

SIZES: dict[str, Any] = {
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "head_dim": 16,
}


def twins(root: Path, family: str, recipe: Recipe, **sizes: Any) -> tuple[Path, Path]:
    """A quantised model, and the plain one with its values. Embeddings of latents are
    not a whole number of words."""
    plain = write_tiny_model(root / "plain", family, **(SIZES | sizes))
    oracle = root / "oracle"
    folder = quantize_folder(
        plain,
        root / "quantised",
        recipe,
        chosen=lambda name, t: is_linear(name, t) and "kv_" not in name,
        oracle=oracle,
    )
    return folder, oracle


@pytest.mark.parametrize("recipe", FOUR_BITS)
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_logits_are_those_of_the_values(
    family: str, recipe: str, tmp_path: Path
) -> None:
    folder, oracle = twins(tmp_path, family, FOUR_BITS[recipe])
    expected = logits(oracle)
    found = logits(folder)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert (logits(tmp_path / "plain") - expected).abs().max() > 10 * TOLERANCE
    # Experts cannot reorder their inputs.
    experts = 1 if family == "Qwen3MoeForCausalLM" else 0
    assert count_quantised(folder) == (8 - 2 * experts) + experts


@pytest.mark.parametrize("recipe", FOUR_BITS)
def test_each_rank_holds_its_part(recipe: str, tmp_path: Path) -> None:
    """Ranks that get a part of reordered inputs dequantise them."""
    folder, oracle = twins(tmp_path, "LlamaForCausalLM", FOUR_BITS[recipe])
    for rank in range(2):
        wide = {"dtype": torch.float64}
        with tensor_parallel_group(TensorParallelGroup(rank=rank, size=2)):
            ours, theirs = load(folder, **wide), load(oracle, **wide)
        compared = 0
        for one, other in zip(ours.modules(), theirs.modules(), strict=True):
            order = getattr(getattr(one, "quantized", None), "columns", None)
            for made, expected in pairs(one, other):
                columns = slice(None) if order is None else order
                assert torch.equal(made, expected[:, columns]), rank
                compared += 1
        assert compared == 9  # with the head


# -- what is refused ---------------------------------------------------------------

Edit = Callable[[dict[str, Tensor], dict[str, Any]], object]
DOWN = "model.layers.1.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"


def edit(name: str, change: Callable[[Tensor], Tensor | None]) -> Edit:
    def run(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        made = change(tensors.pop(name))
        if made is not None:
            tensors[name] = made.contiguous()

    return run


def quantization(**changes: Any) -> Edit:
    return lambda tensors, config: config["quantization_config"].update(changes)


BAD: list[tuple[str, Edit, str]] = [
    ("gptq", edit(DOWN + ".scales", lambda t: None), f"there is no {DOWN}.scales"),
    (
        "gptq",
        edit(DOWN + ".scales", lambda t: t[:3]),
        r"down_proj.scales has shape \(3, 64\), but group_size 32 makes it \(4, 64\)",
    ),
    ("gptq", edit(DOWN + ".scales", lambda t: t * 0), "scales holds a scale of 0.0"),
    (
        "gptq",
        edit(DOWN + ".scales", lambda t: t / 0),
        "down_proj.scales holds a scale of inf",
    ),
    ("gptq", edit(DOWN + ".qweight", lambda t: t.float()), "qweight is torch.float32"),
    ("gptq", edit(DOWN + ".qweight", lambda t: t[:-1]), "does not divide the 120 inp"),
    (
        "gptq",
        edit(DOWN + ".qzeros", lambda t: t + 1),
        "qzeros holds other zeros than 8",
    ),
    (
        "gptq",
        quantization(group_size=48),
        "group_size 48 does not divide the 128 inputs",
    ),
    ("gptq", quantization(group_size=0), "group_size must be positive"),
    ("gptq", quantization(bits=8), "bits must be 4, got 8"),
    (
        "gptq",
        quantization(checkpoint_format="marlin"),
        "checkpoint_format must be gptq",
    ),
    ("gptq", quantization(dynamic={"x": {}}), "dynamic must be empty"),
    (
        "gptq-act-order",
        edit(DOWN + ".g_idx", lambda t: t * 0),
        "g_idx must put 16 inputs into each of 8 groups",
    ),
    (
        "gptq-act-order",
        edit(Q + ".g_idx", lambda t: t.roll(1)),
        "columns orders inputs unlike the other weights",
    ),
    ("awq", quantization(version="gemv"), "version must be gemm"),
    ("awq", edit(DOWN + ".qzeros", lambda t: t[:, :4]), "qzeros has shape"),
    (
        "packed",
        edit(DOWN + ".weight_scale", lambda t: t[:, :2]),
        "weight_scale has sha",
    ),
    (
        "packed-zeros",
        edit(DOWN + ".weight_zero_point", lambda t: t[:4]),
        "weight_zero_point has shape",
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("4-bits")
    return {
        name: twins(root / name, "LlamaForCausalLM", recipe)[0]
        for name, recipe in FOUR_BITS.items()
    }


@pytest.mark.parametrize(("recipe", "change", "message"), BAD)
def test_what_is_refused(
    recipe: str,
    change: Edit,
    message: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    tensors = load_file(folders[recipe] / "model.safetensors")
    config = json.loads((folders[recipe] / "config.json").read_text())
    change(tensors, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
