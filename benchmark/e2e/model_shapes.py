"""config.json folders of real model shapes, for dummy weights: no downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}


def write_shape(name: str, folder: Path) -> Path:
    """Write the config.json of `name`; serve `folder` with --load-format dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name] | {"eos_token_id": SHAPES[name]["vocab_size"] - 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_draft_shape(name: str, folder: Path, *, draft_vocab: int = 32000) -> Path:
    """Write the config.json of an EAGLE3 head of one layer for `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "eos_token_id": SHAPES[name]["vocab_size"] - 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
