"""Quantises checkpoints in the formats that are published, for tests and trials.

`quantize_folder` writes a quantised checkpoint, and `dequantize_folder` the plain one
with exactly its values, whose products are the oracle.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang.srt.layers.ops.linear.quantized import E4M3_MAX
from sglang.srt.model_loader.weight_utils import iterate_weights

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


def _positive(scales: Tensor) -> Tensor:
    """Return scales, 1 for weights that are zero or too small for one."""
    return torch.where(scales > 0, scales, 1)


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _store_tensor(weight: Tensor) -> Tensors:
    scale = _positive(weight.abs().amax() / E4M3_MAX)
    stored = {"weight": _scaled(weight, scale), "weight_scale": scale}
    return stored | {"input_scale": torch.tensor(0.5)}


def _store_channel(weight: Tensor) -> Tensors:
    scale = _positive((weight.abs().amax(1, keepdim=True) / E4M3_MAX).bfloat16())
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
        scales = _positive(scales)
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


# -- 4 bits ------------------------------------------------------------------------


def _grouped(weight: Tensor, size: int, *, symmetric: bool) -> tuple[Tensor, ...]:
    """Return codes [N, K] of 0 to 15, scales [N, G] in half precision, and zeros [N, G]
    of 1 to 15."""
    groups = weight.unflatten(1, (-1, size))
    if symmetric:
        scales = _positive((groups.abs().amax(2) / 7).half())
        zeros = torch.full_like(scales, 8)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = _positive(((high - low) / 14).half())
        zeros = (-low / scales.float()).round().clamp(1, 15).half()
    wide = scales.float()[..., None]
    codes = (groups / wide + zeros[..., None]).round().clamp(0, 15)
    return codes.flatten(1).int(), scales, zeros.int()


def _ungrouped(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    size = codes.shape[1] // scales.shape[1]
    wide = [part.repeat_interleave(size, 1).float() for part in (scales, zeros)]
    return (codes - wide[1]) * wide[0]


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack the last dimension of codes, eight to an int32; nibble i holds
    `order[i]`."""
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for nibble, place in enumerate(order):
        words |= codes[..., place::8].long() << (4 * nibble)
    return (words - ((words >> 31) << 32)).int()


def _kept_values(store: Callable[..., tuple[Tensors, Tensor]]) -> Recipe:
    """A recipe whose `store` also returns the values, kept until they are asked for."""
    kept: list[Tensor] = []

    def stored(weight: Tensor) -> Tensors:
        made, values = store(weight)
        kept[:] = [values]
        return made

    return Recipe(config={}, store=stored, values=lambda _: kept[0])


def gptq_recipe(*, size: int, act_order: bool, symmetric: bool) -> Recipe:
    def store(weight: Tensor) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        order = torch.arange(inputs)
        if act_order:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
        codes, scales, zeros = _grouped(weight[:, order], size, symmetric=symmetric)
        group = torch.empty(inputs, dtype=torch.int32)
        group[order] = torch.arange(inputs, dtype=torch.int32) // size
        back = order.argsort()
        made = {
            "qweight": _words(codes[:, back]).t(),
            "qzeros": _words((zeros - 1).t()),
            "scales": scales.t(),
            "g_idx": group,
        }
        return made, _ungrouped(codes, scales, zeros)[:, back]

    config = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": symmetric}
    return dataclasses.replace(
        _kept_values(store), config=config | {"desc_act": act_order}
    )


def awq_recipe(*, size: int) -> Recipe:
    interleaved = (0, 2, 4, 6, 1, 3, 5, 7)

    def store(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = _grouped(weight, size, symmetric=False)
        made = {
            "qweight": _words(codes.t(), interleaved),
            "qzeros": _words(zeros.t(), interleaved),
            "scales": scales.t(),
        }
        return made, _ungrouped(codes, scales, zeros)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return dataclasses.replace(_kept_values(store), config=config)


def packed_recipe(*, size: int, symmetric: bool) -> Recipe:
    def store(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = _grouped(weight, size, symmetric=symmetric)
        made = {
            "weight_packed": _words(codes),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            made["weight_zero_point"] = _words(zeros.t()).t()
        return made, _ungrouped(codes, scales, zeros)

    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": size,
        "symmetric": symmetric,
    }
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return dataclasses.replace(_kept_values(store), config=config)


def mxfp4_values(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [..., G * 32] of blocks [..., G, 16] and exponents [..., G]."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    signed = torch.where(codes >= 8, -magnitude, magnitude)
    powers = torch.tensor([2.0 ** (i - 127) for i in range(255)] + [float("nan")])
    return (signed * powers[scales.int()][..., None]).flatten(-2).to(dtype)


FOUR_BITS = {
    "gptq": gptq_recipe(size=32, act_order=False, symmetric=True),
    "gptq-act-order": gptq_recipe(size=16, act_order=True, symmetric=False),
    "awq": awq_recipe(size=32),
    "packed": packed_recipe(size=32, symmetric=True),
    "packed-zeros": packed_recipe(size=16, symmetric=False),
}


def tensor_recipe() -> Recipe:
    """Return one scale per tensor, with a static scale of activations."""
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    return Recipe(config=config, store=_store_tensor, values=_values)


def channel_recipe() -> Recipe:
    """Return a scale per row, in the format of compressed-tensors."""
    return Recipe(config=_compressed("channel"), store=_store_channel, values=_values)


RECIPES = {
    "tensor": tensor_recipe(),
    "channel": channel_recipe(),
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


def is_whole_linear(name: str, tensor: Tensor) -> bool:
    """As `is_linear`, of a tiny weight that fills words and groups of 4 bits."""
    rows, columns = tensor.shape if tensor.dim() == 2 else (1, 1)
    return is_linear(name, tensor) and rows % 8 == columns % 32 == 0


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
    weights = dict(iterate_weights(folder))
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
        is_weights = ".safetensors" in file.name or file.suffix == ".gguf"
        if file.is_file() and not is_weights and file.name != "config.json":
            yield file
