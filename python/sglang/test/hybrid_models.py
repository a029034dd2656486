"""Writes tiny checkpoints of hybrid models with random weights, by transformers' own
classes: their configurations, tensor names and layouts are the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang.test.tiny_models import EOS_ID, write_byte_tokenizer, write_tiny_model

_LINEAR, _FULL = "linear_attention", "full_attention"
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
    "pad_token_id": None,
}
_DELTA = _SIZES | {
    "head_dim": 24,
    "attention_bias": True,
    "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "shared_expert_intermediate_size": 40,
}
# Architecture -> model type and text configuration, with every feature on. Layer types
# repeat if there are more layers.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Lfm2ForCausalLM": (
        "lfm2",
        _SIZES
        | {
            "layer_types": ["conv", _FULL, "conv", "conv"],
            "conv_bias": True,
            "block_multiple_of": 8,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3NextForCausalLM": (
        "qwen3_next",
        _DELTA | _EXPERTS | {"mlp_only_layers": [1]},
    ),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", _DELTA | {"tie_word_embeddings": True}),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", _DELTA | _EXPERTS),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", _DELTA),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", _DELTA | _EXPERTS),
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 1,
    "patch_size": 8,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def hybrid_model(architecture: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return transformers' model with random weights, float32."""
    import transformers

    model_type, text = HYBRIDS[architecture]
    values = text | overrides
    types = values["layer_types"]
    values["layer_types"] = [
        types[layer % len(types)] for layer in range(values["num_hidden_layers"])
    ]
    if "ForConditionalGeneration" in architecture:
        tied = values["tie_word_embeddings"]
        values = {"text_config": values, "vision_config": _VISION}
        values |= {"tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(model_type, **values)
    model = getattr(transformers, architecture)(config).float().eval()
    randomise(model, seed=seed)
    return model


def randomise(model: nn.Module, *, seed: int = 0) -> None:
    """Draw all weights, so that none has a special value such as 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                # From decays that keep a thousand tokens to decays that keep one.
                weight.copy_(2 * noise - 3)
            elif "norm" in name:
                weight.add_(0.1 * noise)
            else:
                weight.copy_(0.15 * noise)


def write_hybrid_model(
    folder: Path, architecture: str, *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a folder with config.json, random weights and a byte tokenizer."""
    hybrid_model(architecture, seed=seed, **overrides).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def write_text_model(folder: Path, architecture: str, **options: Any) -> Path:
    """Write a tiny model of any architecture that can be served."""
    write = write_hybrid_model if architecture in HYBRIDS else write_tiny_model
    return write(folder, architecture, **options)
