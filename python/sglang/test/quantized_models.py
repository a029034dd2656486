"""Quantises checkpoints in the formats that are published, for tests and trials.

`quantize_folder` writes a quantised checkpoint, and `dequantize_folder` the plain one
with exactly its values, whose products are the oracle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.srt.layers.ops.linear.quantized import E4M3_MAX

E4M3 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to quantise a checkpoint.

    Fields:
        config: its `quantization_config`.
        store: the tensors of a weight [N, K], by the suffix that replaces `.weight`.
        values: the weight in float32 from these tensors.
    """

    config: dict[str, Any]
    store: Callable[[Tensor], Tensors]
    values: Callable[[Tensors], Tensor]


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _store_tensor(weight: Tensor) -> Tensors:
    scale = weight.abs().amax() / E4M3_MAX
    stored = {"weight": _scaled(weight, scale), "weight_scale": scale}
    return stored | {"input_scale": torch.tensor(0.5)}


def _store_channel(weight: Tensor) -> Tensors:
    scale = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).bfloat16()
    return {"weight": _scaled(weight, scale.float()), "weight_scale": scale}


def _values(stored: Tensors) -> Tensor:
    return stored["weight"].float() * stored["weight_scale"].float()


def _expand(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def block_recipe(rows: int, columns: int) -> Recipe:
    """Return the format of Qwen's and DeepSeek's checkpoints."""
    block = (rows, columns)

    def store(weight: Tensor) -> Tensors:
        n, k = weight.shape
        scales = torch.zeros(-(-n // rows), -(-k // columns))
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                part = weight[
                    i * rows : (i + 1) * rows, j * columns : (j + 1) * columns
                ]
                scales[i, j] = part.abs().amax() / E4M3_MAX
        codes = _scaled(weight, _expand(scales, block, weight.shape))
        return {"weight": codes, "weight_scale_inv": scales}

    def values(stored: Tensors) -> Tensor:
        codes = stored["weight"]
        return codes.float() * _expand(stored["weight_scale_inv"], block, codes.shape)

    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [rows, columns],
    }
    return Recipe(config=config, store=store, values=values)


def _compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    inputs = weights | {"strategy": "token", "dynamic": True}
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


RECIPES = {
    "tensor": Recipe(
        config={"quant_method": "fp8", "activation_scheme": "static"},
        store=_store_tensor,
        values=_values,
    ),
    "channel": Recipe(
        config=_compressed("channel"), store=_store_channel, values=_values
    ),
    "block": block_recipe(32, 32),
    "block-128": block_recipe(128, 128),
}


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether checkpoints of 8 bits quantise this tensor."""
    plain = ("embed", "lm_head", "mlp.gate.", "router", "conv1d", "shared_expert_gate")
    return (
        name.endswith(".weight")
        and tensor.dim() == 2
        and not any(part in name for part in plain)
    )


def quantize_folder(
    folder: Path,
    target: Path,
    recipe: Recipe,
    *,
    chosen: Callable[[str, Tensor], bool] = is_linear,
    oracle: Path | None = None,
) -> Path:
    """Write the model of `folder` to `target`, with the `chosen` weights quantised.

    Args:
        oracle: folder for the plain model with exactly these values, in float32.
    """
    weights = load_file(folder / "model.safetensors")
    stored: Tensors = {}
    plain: Tensors = {}
    for name, tensor in weights.items():
        if not chosen(name, tensor):
            stored[name] = plain[name] = tensor
            continue
        parts = recipe.store(tensor.float())
        plain[name] = recipe.values(parts)
        module = name.removesuffix("weight")
        stored |= {module + part: made for part, made in parts.items()}
    _write(folder, target, stored, {"quantization_config": recipe.config})
    if oracle is not None:
        _write(folder, oracle, plain, {})
    return target


def _write(folder: Path, target: Path, tensors: Tensors, extra: dict[str, Any]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in _other_files(folder):
        shutil.copy(file, target / file.name)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | extra))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})


def _other_files(folder: Path) -> Iterator[Path]:
    for file in folder.iterdir():
        if file.is_file() and file.name not in ("model.safetensors", "config.json"):
            yield file
