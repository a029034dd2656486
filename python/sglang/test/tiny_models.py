"""Generates tiny checkpoints for tests, without downloads.

Random weights of real architectures, the mock model, and a byte tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

BYTE_VOCAB = 256
EOS = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EOS_ID = BYTE_VOCAB

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
}
# Architecture -> fields of its config.json in addition to TINY.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "head_dim": 16},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 12},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 24},
    "Qwen2MoeForCausalLM": {
        "model_type": "qwen2_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "head_dim": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 36,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "DeepseekV2ForCausalLM": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 1,
    },
    "DeepseekV3ForCausalLM": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 40,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 36,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
}
_GEMMA2 = {
    "model_type": "gemma2",
    "head_dim": 24,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "sliding_window": 12,
}
_GEMMA3 = _GEMMA2 | {
    "model_type": "gemma3_text",
    "sliding_window_pattern": 2,
    "rope_theta": 5e4,
    "rope_local_base_freq": 1e3,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
FAMILIES |= {
    "Gemma2ForCausalLM": _GEMMA2
    | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0},
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "attention_bias": True,
        "sliding_window": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
}
# Architecture -> the rest of its config.json, whose `text_config` is the model.
MULTIMODAL: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 16,
            "patch_size": 8,
        },
    },
}
# Families with q, k and v biases, and families with head norms.
QKV_BIAS = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM")
GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *GEMMA3)


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token ids are bytes, plus an end-of-text token."""
    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(BYTE_VOCAB)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_tiny_model(
    folder: Path, architecture: str, *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a folder with config.json, random weights and a byte tokenizer.

    A multimodal one also has a tensor of its vision tower.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = (
        TINY | FAMILIES[architecture] | {"architectures": [architecture]} | overrides
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _random(name, shape, generator)
        for name, shape in tensor_shapes(config).items()
    }
    if architecture in MULTIMODAL:
        weights = {f"language_model.{name}": weights[name] for name in weights}
        weights["vision_tower.vision_model.post_layernorm.bias"] = torch.ones(16)
        text = {key: config[key] for key in config if key != "architectures"}
        config = MULTIMODAL[architecture] | {
            "architectures": [architecture],
            "text_config": text,
        }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(folder)
    return folder


def write_mock_model(folder: Path, **overrides: Any) -> Path:
    """Write a folder for the mock model, which has no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MockForCausalLM"],
        "model_type": "mock",
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    } | overrides
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder)
    return folder


MOCK_STATE: dict[str, Any] = {
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
}
"""Overrides of `write_mock_model` for a mock model whose second layer keeps a state."""

# Kind of draft -> architecture.
MOCK_DRAFTS = {
    "EAGLE": "MockForCausalLMEagle",
    "EAGLE3": "MockForCausalLMEagle3",
    "STANDALONE": "MockForCausalLMDraft",
}
EAGLE_HEADS = {"EAGLE": "LlamaForCausalLMEagle", "EAGLE3": "LlamaForCausalLMEagle3"}


def write_mock_draft(
    folder: Path, *, kind: str, source: str | None = None, **overrides: Any
) -> Path:
    """Write a folder for a draft of the mock model.

    `kind` is EAGLE, EAGLE3 or STANDALONE, `source` attention or hidden (see
    `DraftSettings`). Sizes in `overrides` must be the target's.
    """
    captured = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    config = (
        {"architectures": [MOCK_DRAFTS[kind]]}
        | ({} if source is None else {"mock_draft_source": source})
        | ({"eagle_config": captured} if kind == "EAGLE3" else {})
    )
    return write_mock_model(folder, **config | overrides)


def write_tiny_eagle(
    folder: Path,
    target: Path,
    *,
    algorithm: str,
    draft_vocab_size: int | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a random EAGLE or EAGLE3 head of one layer for the tiny model in `target`.

    Its tensors have the names that published checkpoints use.
    """
    raw = json.loads((target / "config.json").read_text())
    kept = (*TINY, *FAMILIES["LlamaForCausalLM"])
    layers = raw["num_hidden_layers"]
    captured = sorted({0, layers // 2, layers})
    config = {name: raw[name] for name in kept if name in raw} | {
        "architectures": [EAGLE_HEADS[algorithm]],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    if algorithm == "EAGLE3":
        ids = [layer - 1 for layer in captured]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
        config["draft_vocab_size"] = draft_vocab_size or config["vocab_size"]
    config |= overrides
    write_eagle_files(folder, config, eagle_weights(config, seed=seed))
    return folder


def write_eagle_files(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def eagle_weights(config: dict[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tensors of the head that `config` describes.

    With a draft vocabulary they include the map to the target's ids.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _random(name, shape, generator)
        for name, shape in eagle_shapes(config).items()
    }
    vocab, drafted = config["vocab_size"], config.get("draft_vocab_size")
    if drafted is not None and drafted < vocab:
        ids = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        weights["d2t"] = ids - torch.arange(drafted)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        weights["t2d"][ids] = True
    return weights


def eagle_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an EAGLE or EAGLE3 head, without the vocabulary's map."""
    hidden = config["hidden_size"]
    if config["architectures"] == [EAGLE_HEADS["EAGLE"]]:
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
        for i in range(config["num_hidden_layers"]):
            shapes |= _eagle_layer_shapes(f"layers.{i}.", config, inputs=hidden)
            if i:
                shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
        return shapes
    settings = config.get("eagle_config") or {}
    sources = len(settings.get("eagle_aux_hidden_state_layer_ids") or range(3))
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
    return (
        _eagle_layer_shapes("midlayer.", config, inputs=2 * hidden)
        | {"fc.weight": (hidden, sources * hidden)}
        | {f"{name}.weight": (hidden,) for name in norms}
        | {"lm_head.weight": (config["draft_vocab_size"], hidden)}
    )


def _eagle_layer_shapes(
    layer: str, config: dict[str, Any], *, inputs: int
) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    return {
        f"{layer}self_attn.q_proj.weight": (q, inputs),
        f"{layer}self_attn.k_proj.weight": (kv, inputs),
        f"{layer}self_attn.v_proj.weight": (kv, inputs),
        f"{layer}self_attn.o_proj.weight": (hidden, q),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        f"{layer}post_attention_layernorm.weight": (hidden,),
    }


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the architecture that `config` describes."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    vocab = config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    projections = {
        "q": heads * head_dim,
        "k": kv_heads * head_dim,
        "v": kv_heads * head_dim,
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        if config.get("kv_lora_rank"):
            shapes |= _deepseek_layer_shapes(layer, config, is_dense=i == 0)
            continue
        for name, size in projections.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (size, hidden)
            if config["architectures"][0] in QKV_BIAS:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (size,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        if config["architectures"][0] in QK_NORM:
            shapes[layer + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (head_dim,)
        experts = config.get("num_experts") or config.get("num_local_experts")
        is_turn = (i + 1) % config.get("decoder_sparse_step", 1) == 0
        if config["model_type"] == "gpt_oss":
            shapes |= _gpt_oss_shapes(layer, config)
        elif experts and is_turn and i not in config.get("mlp_only_layers", ()):
            shapes |= _moe_shapes(layer + "mlp.", config, experts=experts)
        else:
            shapes |= _mlp_shapes(layer + "mlp.", hidden, inner)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config["model_type"].startswith("gemma"):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            shapes[f"{layer}{name}.weight"] = (hidden,)
    return shapes


def _gpt_oss_shapes(layer: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, experts = config["num_attention_heads"], config["num_local_experts"]
    return {
        f"{layer}self_attn.o_proj.bias": (hidden,),
        f"{layer}self_attn.sinks": (heads,),
        f"{layer}mlp.router.weight": (experts, hidden),
        f"{layer}mlp.router.bias": (experts,),
        f"{layer}mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
        f"{layer}mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
        f"{layer}mlp.experts.down_proj": (experts, inner, hidden),
        f"{layer}mlp.experts.down_proj_bias": (experts, hidden),
    }


def _deepseek_layer_shapes(
    layer: str, config: dict[str, Any], *, is_dense: bool
) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, query_rank = config["kv_lora_rank"], config["q_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value = config["v_head_dim"]
    queries = heads * (nope + rope)
    attention: dict[str, tuple[int, ...]] = {"q_proj": (queries, hidden)}
    if query_rank:
        attention = {
            "q_a_proj": (query_rank, hidden),
            "q_a_layernorm": (query_rank,),
            "q_b_proj": (queries, query_rank),
        }
    attention |= {
        "kv_a_proj_with_mqa": (rank + rope, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + value), rank),
        "o_proj": (hidden, heads * value),
    }
    shapes = {f"{layer}self_attn.{n}.weight": shape for n, shape in attention.items()}
    if config.get("attention_bias"):
        for name in {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"} & {*attention}:
            shapes[f"{layer}self_attn.{name}.bias"] = attention[name][:1]
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}{name}.weight"] = (hidden,)
    mlp, inner = f"{layer}mlp.", config["moe_intermediate_size"]
    if is_dense and config["first_k_dense_replace"]:
        return shapes | _mlp_shapes(mlp, hidden, config["intermediate_size"])
    experts = config["n_routed_experts"]
    shared = inner * config["n_shared_experts"]
    if config["model_type"] == "deepseek_v3":
        shapes[f"{mlp}gate.e_score_correction_bias"] = (experts,)
    return (
        shapes
        | _moe_shapes(mlp, config, experts=experts)
        | _mlp_shapes(f"{mlp}shared_experts.", hidden, shared)
    )


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _moe_shapes(
    mlp: str, config: dict[str, Any], *, experts: int
) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{mlp}gate.weight": (experts, hidden)}
    for expert in range(experts):
        shapes |= _mlp_shapes(f"{mlp}experts.{expert}.", hidden, inner)
    shared = config.get("shared_expert_intermediate_size")
    if shared:
        shapes |= _mlp_shapes(f"{mlp}shared_expert.", hidden, shared)
        shapes[f"{mlp}shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _random(
    name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1.0 + 0.1 * noise if "norm" in name else 0.15 * noise


def byte_alphabet() -> list[str]:
    """Return the byte-level alphabet: printable bytes, and the others from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(BYTE_VOCAB) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable}
    chars |= {byte: chr(BYTE_VOCAB + i) for i, byte in enumerate(rest)}
    return [chars[byte] for byte in range(BYTE_VOCAB)]
