"""Models with weights of 8 bits against the plain models with exactly their values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import Module

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    tensor_parallel_group,
)
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.ops.linear.quantized import dequantize, quantize_rows
from sglang.srt.layers.ops.moe.op import expert_matrices
from sglang.srt.model_loader.loader import load_model
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.quantized_models import (
    RECIPES,
    Recipe,
    is_linear,
    quantize_folder,
)
from sglang.test.scale import is_full
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=6, suite="cpu")

# The same float32 sums in another order.
TOLERANCE = 1e-4
FAMILIES = (
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM",
)
Edit = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
TOKENS = torch.randint(0, 264, (19,), generator=torch.Generator().manual_seed(1))


def logits(folder: Path, **options: object) -> torch.Tensor:
    """Of a prompt, then of two decode steps."""
    harness = ForwardHarness(folder, **options)  # type: ignore[arg-type]
    row = harness.new_row(TOKENS.tolist())
    found = [harness.extend([(row, len(TOKENS))])[0]]
    for token in (3, 200):
        harness.append(row, token)
        found.append(harness.forward(ForwardMode.DECODE, [(row, None)])[0])
    return torch.stack(found)


def cases(families: Sequence[str]) -> list[tuple[str, str]]:
    """Every family with every recipe; in CI every one of both."""
    every = [*itertools.product(families, RECIPES)]
    size = max(len(families), len(RECIPES))
    diagonal = [
        (families[i % len(families)], list(RECIPES)[i % len(RECIPES)])
        for i in range(size)
    ]
    return every if is_full() else diagonal


@pytest.mark.parametrize(("family", "recipe"), cases(FAMILIES))
def test_logits_are_those_of_the_values(
    family: str, recipe: str, tmp_path: Path
) -> None:
    plain, oracle = write_tiny_model(tmp_path / "plain", family), tmp_path / "oracle"
    folder = quantize_folder(
        plain, tmp_path / "quantised", RECIPES[recipe], oracle=oracle
    )
    expected = logits(oracle)
    torch.testing.assert_close(logits(folder), expected, atol=TOLERANCE, rtol=TOLERANCE)
    # The oracle is not the model before quantisation.
    assert (logits(plain) - expected).abs().max() > 10 * TOLERANCE
    assert count_quantised(folder) == count_quantised(plain, "fp8") > 0


def load(folder: Path, method: str | None = None, **options: object) -> Module:
    given: dict[str, Any] = {"load_format": "auto", "dtype": torch.float32} | options
    config = ModelConfig.from_path(folder, quantization=method)
    return load_model(config, rope_rows=64, **given)


def count_quantised(folder: Path, method: str | None = None) -> int:
    modules = list(load(folder, method).modules())
    linears = [m for m in modules if isinstance(m, Linear)]
    experts = sum(isinstance(m, Experts) for m in modules)
    return sum(m.quantized is not None for m in linears) + experts


def test_transformers_reads_the_same_values(tmp_path: Path) -> None:
    """Its own format of blocks, dequantised by itself."""
    plain = write_tiny_model(tmp_path / "plain", "LlamaForCausalLM")
    folder = quantize_folder(plain, tmp_path / "quantised", RECIPES["block"])
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(
            dequantize=True, weight_block_size=(32, 32)
        ),
    )
    with torch.inference_mode():
        expected = reference(TOKENS[None]).logits[0, -1]
    found = logits(folder)[0]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_model_is_quantised_while_it_is_read(
    family: str, tmp_path: Path
) -> None:
    """By row; the same values as when the checkpoint was quantised so."""
    plain, oracle = write_tiny_model(tmp_path / "plain", family), tmp_path / "oracle"
    by_row = Recipe(config={}, store=_store_row, values=_row_values)
    quantize_folder(
        plain,
        tmp_path / "unused",
        by_row,
        chosen=lambda name, tensor: is_linear(name, tensor) and "kv_b" not in name,
        oracle=oracle,
    )
    torch.testing.assert_close(
        logits(plain, quantization="fp8"),
        logits(oracle),
        atol=TOLERANCE,
        rtol=TOLERANCE,
    )


def _store_row(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scales = quantize_rows(weight)
    return {"weight": codes, "weight_scale": scales}


def _row_values(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    return stored["weight"].float() * stored["weight_scale"]


# -- ranks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "recipe"), cases(["Qwen3MoeForCausalLM", "LlamaForCausalLM"])
)
def test_each_rank_holds_its_part(
    family: str,
    recipe: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the codes and of the scales. Where a cut goes through columns that share a
    scale, the weight is dequantised."""
    monkeypatch.setattr("sglang.srt.layers.quantization._warned", False)
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16}
    plain = write_tiny_model(tmp_path / "plain", family, **sizes)
    folder, oracle = tmp_path / "quantised", tmp_path / "oracle"
    quantize_folder(plain, folder, RECIPES[recipe], oracle=oracle)
    for rank in range(2):
        with tensor_parallel_group(TensorParallelGroup(rank=rank, size=2)):
            wide = {"dtype": torch.float64}  # which is not packed
            ours, theirs = load(folder, **wide), load(oracle, **wide)
        compared = 0
        for one, other in zip(ours.modules(), theirs.modules(), strict=True):
            for made, expected in pairs(one, other):
                assert torch.equal(made, expected), rank
                compared += 1
        assert compared >= 8
    assert ("cannot cut are dequantised" in caplog.text) == (recipe == "block-128")


def pairs(ours: Module, theirs: Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(ours, Linear) and isinstance(theirs, Linear):
        made, plain = ours.quantized, ours.weight
        assert theirs.weight is not None and (made is None) == (plain is not None)
        values = plain.data if made is None else dequantize(made).double()
        yield values, theirs.weight.data
    if isinstance(ours, Experts) and isinstance(theirs, Experts):
        for expert in range(ours.weights.count):
            made_of_one = expert_matrices(ours.weights, expert)[:2]
            expected = expert_matrices(theirs.weights, expert)[:2]
            yield from zip(made_of_one, expected, strict=True)


def test_dummy_weights_are_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    whole = load(folder, "fp8", load_format="dummy")
    with tensor_parallel_group(TensorParallelGroup(rank=1, size=2)):
        part = load(folder, "fp8", load_format="dummy")
    mine, yours = (
        dequantize(model.model.layers[0].mlp.down_proj.quantized)  # type: ignore
        for model in (part, whole)
    )
    assert torch.equal(mine, yours[:, 48:]) and 0.01 < float(yours.std()) < 0.03


# -- parts that are not quantised --------------------------------------------------


def test_a_product_that_is_quantised_in_part_is_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, oracle = (
        write_tiny_model(tmp_path / "plain", "LlamaForCausalLM"),
        tmp_path / "oracle",
    )
    folder = quantize_folder(
        plain,
        tmp_path / "quantised",
        RECIPES["channel"],
        chosen=lambda name, tensor: "k_proj" in name or "down_proj" in name,
        oracle=oracle,
    )
    torch.testing.assert_close(
        logits(folder), logits(oracle), atol=TOLERANCE, rtol=TOLERANCE
    )
    assert count_quantised(folder) == 2
    assert "quantised only in part and are dequantised" in caplog.text


# -- what is refused ---------------------------------------------------------------

DOWN = "model.layers.1.mlp.down_proj.weight"


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Edit:
    def run(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        made = change(tensors.pop(name))
        if made is not None:
            tensors[name] = made

    return run


def set_config(**changes: Any) -> Edit:
    return lambda tensors, config: config["quantization_config"].update(changes)


def scale_of(value: float) -> Edit:
    return edit(DOWN + "_scale_inv", lambda scales: scales.fill_(value))


def with_code(codes: torch.Tensor, code: int) -> torch.Tensor:
    codes.view(torch.uint8)[-1, -1] = code
    return codes


BAD: dict[str, tuple[Edit, str]] = {
    "no scales": (
        edit(DOWN + "_scale_inv", lambda scales: None),
        rf"{DOWN} is quantised \(F8_E4M3\), but there is no {DOWN}_scale_inv or",
    ),
    "shape": (
        edit(DOWN + "_scale_inv", lambda scales: scales[:1]),
        r"down_proj.weight_scale_inv has shape \(1, 3\), .* \(2, 3\)",
    ),
    "zero": (scale_of(0.0), "down_proj.weight_scale_inv holds a scale of 0.0"),
    "nan": (scale_of(float("nan")), "down_proj.weight_scale_inv holds a scale of nan"),
    "nan code": (
        edit(DOWN, lambda codes: with_code(codes, 0xFF)),
        f"tensor {DOWN} holds NaN; weights must be finite",
    ),
    "infinite": (scale_of(float("inf")), "holds a scale of inf"),
    "negative": (scale_of(-1.0), "holds a scale of -1.0"),
    "other type": (
        edit(DOWN, lambda codes: codes.float().to(torch.float8_e5m2)),
        f"{DOWN} is F8_E5M2",
    ),
    "missing": (
        edit(DOWN, lambda codes: None),
        "down_proj.weight_scale_inv has no place",
    ),
    "unknown module": (
        set_config(modules_to_not_convert=["model.layers.7.mlp"]),
        'excludes "model.layers.7.mlp", but the checkpoint has no module',
    ),
    "quantised module": (
        set_config(modules_to_not_convert=["mlp.down_proj"]),
        'excludes "mlp.down_proj", but the checkpoint quantises model.layers',
    ),
    "expression": (
        set_config(ignore=["re:("]),
        r'excludes "re:\(", which is no regular',
    ),
    "block": (set_config(weight_block_size=[32]), r"weight_block_size must be \[rows"),
    "method": (
        set_config(quant_method="exl2"),
        'quant_method is "exl2".*supported: fp8',
    ),
    "fmt": (set_config(fmt="e5m2"), "fmt must be e4m3"),
    "no config": (
        lambda tensors, config: config.pop("quantization_config"),
        "float8_e4m3fn, which is only read if .* quantization_config",
    ),
}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    plain = write_tiny_model(folder / "plain", "LlamaForCausalLM")
    return quantize_folder(plain, folder / "quantised", RECIPES["block"])


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str, blocks: Path, tmp_path: Path) -> None:
    change, message = BAD[case]
    tensors = load_file(blocks / "model.safetensors")
    config = json.loads((blocks / "config.json").read_text())
    change(tensors, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_have_no_code(value: float, tmp_path: Path) -> None:
    """A plain checkpoint that is quantised while it is read."""
    folder = write_tiny_model(tmp_path / "plain", "LlamaForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    tensors[DOWN][3, 4] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"tensor {DOWN} holds NaN"):
        load(folder, "fp8")


def test_modules_that_are_excluded_rightly(blocks: Path, tmp_path: Path) -> None:
    patterns = [
        "lm_head",
        "model.norm",
        "re:.*visual.*",
        "model.layers.*.input_layernorm",
    ]
    set_config(modules_to_not_convert=patterns)
    config = json.loads((blocks / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = patterns
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(blocks / "model.safetensors")
    assert count_quantised(tmp_path) == 8


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("compressed-tensors", "is fp8, but --quantization is compressed-tensors"),
        ("mxfp4", "is fp8, but --quantization is mxfp4"),
    ],
)
def test_a_method_that_is_not_the_checkpoints(
    method: str, message: str, blocks: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_path(blocks, quantization=method)
    assert ModelConfig.from_path(blocks, quantization="w8a8_fp8").quantization


def test_a_method_that_needs_a_quantised_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    with pytest.raises(
        ValueError, match=r"quantization_config is missing, but --quant"
    ):
        ModelConfig.from_path(folder, quantization="compressed-tensors")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
