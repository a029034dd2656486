"""Writes tiny LoRA adapters in the format of peft."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang.srt.arg_groups.lora_hook import TARGET_MODULES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def module_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the modules of one layer, by their names in it."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def adapter_tensors(
    model: Path,
    *,
    rank: int,
    seed: int = 0,
    targets: Sequence[str] = TARGET_MODULES,
    size: float = 0.3,
) -> dict[str, Tensor]:
    """Return random tensors of an adapter for every layer, by peft's names."""
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for module, (outputs, inputs) in module_shapes(model).items():
            if module.rpartition(".")[2] not in targets:
                continue
            name = f"base_model.model.model.layers.{layer}.{module}"
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(shape, generator=generator) * size
                tensors[f"{name}.lora_{side}.weight"] = values
    return tensors


def write_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] = TARGET_MODULES,
    tensors: dict[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write a random adapter of `model`, or given `tensors`; returns its folder.

    Args:
        config: keys of adapter_config.json to change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    if tensors is None:
        tensors = adapter_tensors(model, rank=rank, seed=seed, targets=targets)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
