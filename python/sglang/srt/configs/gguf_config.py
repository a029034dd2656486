"""`config.json` of a model in a GGUF file, made of the file's values.

Owns the table of architectures: names of values and tensors. Reads no tensor but the
factors of the rotary embedding.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.utils.gguf_header import GgufHeader, read_gguf_header
from sglang.srt.utils.json_file import shown

# Key of config.json -> suffix of the GGUF key, which begins with the architecture.
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_TENSORS = _LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How GGUF files spell one architecture.

    Fields:
        model: its class.
        layer_tensors: name of a layer's module in the file -> in the checkpoint.
        pairs_rotary: q and k have the two channels of a rotation side by side; the
            engine has them half a head apart.
        norm_offset: weights of norms are larger by this than those of a checkpoint.
        optional: keys of config.json beside `_OPTIONAL`, likewise.
        config: further content of config.json.
    """

    model: str
    layer_tensors: dict[str, str] = field(default_factory=lambda: _LAYER_TENSORS)
    pairs_rotary: bool = False
    norm_offset: float = 0.0
    optional: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


ARCHITECTURES: dict[str, GgufArchitecture] = {
    "gemma3": GgufArchitecture(
        model="Gemma3ForCausalLM",
        layer_tensors=_GEMMA_TENSORS,
        norm_offset=1.0,
        optional={
            "sliding_window": "attention.sliding_window",
            "sliding_window_pattern": "attention.sliding_window_pattern",
            "rope_local_base_freq": "rope.freq_base_swa",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        config={"model_type": "gemma3_text"},
    ),
    "llama": GgufArchitecture(model="LlamaForCausalLM", pairs_rotary=True),
    "qwen2": GgufArchitecture(
        model="Qwen2ForCausalLM", config={"use_sliding_window": False}
    ),
    "qwen3": GgufArchitecture(
        model="Qwen3ForCausalLM", config={"use_sliding_window": False}
    ),
}


def gguf_architecture(header: GgufHeader) -> GgufArchitecture:
    """The architecture of a file.

    Raises:
        ValueError: it is not served, or the file is a part of a model; names both.
    """
    name = header.values.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise ValueError(
            f"{header.path}: general.architecture {shown(name)} is not served; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    parts = header.values.get("split.count", 1)
    if parts > 1:
        raise ValueError(
            f"{header.path}: one of {parts} parts of a model (split.count); merge the "
            "parts into one file first"
        )
    return known


def gguf_config(path: Path) -> dict[str, Any]:
    """The content that `config.json` would have.

    Raises:
        ValueError: an architecture that is not served, or a value that is missing;
            names file and key.
    """
    header = read_gguf_header(path)
    known = gguf_architecture(header)
    prefix = header.values["general.architecture"]
    config: dict[str, Any] = {"architectures": [known.model]} | known.config
    for name, suffix in _SIZES.items():
        config[name] = _required(header, f"{prefix}.{suffix}")
    # One that is absent is the family's; null would be none.
    for name, suffix in (_OPTIONAL | known.optional).items():
        if (value := header.values.get(f"{prefix}.{suffix}")) is not None:
            config[name] = value
    if "vocab_size" not in config:
        config["vocab_size"] = len(_required(header, "tokenizer.ggml.tokens"))
    config |= _gemma_scalar(config)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["eos_token_id"] = _end_tokens(header)
    config["rope_scaling"] = _rope_scaling(header, prefix, config)
    return config


def _gemma_scalar(config: dict[str, Any]) -> dict[str, Any]:
    """`query_pre_attn_scalar`, which files lack: the width of a head, but for the one
    size of Gemma whose heads are not of 256 channels (27B)."""
    is_gemma = config.get("model_type") == "gemma3_text"
    if not is_gemma or config.get("head_dim", 256) == 256:
        return {}
    scalar = config["hidden_size"] / config["num_attention_heads"]
    return {"query_pre_attn_scalar": scalar}


def _required(header: GgufHeader, key: str) -> Any:
    value = header.values.get(key)
    if value is None:
        raise ValueError(f"{header.path}: {key} is missing")
    return value


def _end_tokens(header: GgufHeader) -> list[int]:
    names = ("eos_token_id", "eot_token_id")
    ids = (header.values.get(f"tokenizer.ggml.{name}") for name in names)
    return sorted({token_id for token_id in ids if token_id is not None})


# Of Llama 3.1 to 3.3; a GGUF file has the factors that follow from these, not these.
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rope_scaling(
    header: GgufHeader, prefix: str, config: dict[str, Any]
) -> dict[str, Any] | None:
    """The scaling of the rotary embedding.

    Raises:
        ValueError: the file has factors per channel that are not those of Llama 3.
    """
    if ROPE_FACTORS in header.tensors:
        factors = _rope_factors(header)
        scaling = _LLAMA3 | {"factor": max(factors)}
        theta = config.get("rope_theta", 10000.0)
        expected = _llama3_factors(theta, len(factors), max(factors))
        if not all(map(_is_near, factors, expected)):
            raise ValueError(
                f"{header.path}: {ROPE_FACTORS} holds other factors than those of "
                "Llama 3, which alone are served"
            )
        return scaling
    kind = header.values.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        return None
    old_context = header.values.get(f"{prefix}.rope.scaling.original_context_length")
    return {
        "rope_type": kind,
        "factor": header.values.get(f"{prefix}.rope.scaling.factor"),
        "original_max_position_embeddings": old_context,
    }


def _llama3_factors(theta: float, count: int, factor: float) -> list[float]:
    """Divisors of the frequencies by `_LLAMA3` (see `rotary_embedding`)."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = (
        _LLAMA3["original_max_position_embeddings"]
        / (2 * math.pi * theta ** (i / count))
        for i in range(count)
    )
    shares = (min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns)
    return [1 / ((1 - share) / factor + share) for share in shares]


def _is_near(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-3)


def _rope_factors(header: GgufHeader) -> list[float]:
    """Divisors of the rotary frequencies, one per pair of channels.

    Raises:
        ValueError: the tensor is no vector of float32 in the file.
    """
    tensor = header.tensors[ROPE_FACTORS]
    is_vector = len(tensor.shape) == 1 and 0 < tensor.shape[0] <= 1 << 16
    if not is_vector or tensor.kind != 0:
        raise ValueError(f"{header.path}: {ROPE_FACTORS} must be a float32 vector")
    size = 4 * tensor.shape[0]
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(size)
    if len(data) < size:
        raise ValueError(f"{header.path}: cut off in {ROPE_FACTORS}; get it again")
    return list(struct.unpack(f"<{tensor.shape[0]}f", data))
