"""Builds the `config.json` of a model in a GGUF file from the file's values.

Owns the table of architectures: names of values and tensors. Does not read tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.configs.config_values import KEYS, MAX_TOKEN_ID, ROPE_KEYS
from sglang.srt.configs.gguf_rope import gguf_rope_scaling
from sglang.srt.utils.checked_values import REQUIRED, ConfigValues, Key
from sglang.srt.utils.gguf_header import GgufHeader, read_gguf_header
from sglang.srt.utils.json_file import shown

# Key of config.json -> suffix of the GGUF key, which begins with the architecture. The
# table for config.json says what each may be.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How GGUF files describe one architecture.

    Fields:
        model: class of the model.
        layer_tensors: name of a layer's module in the file -> in the checkpoint.
        pairs_rotary: whether the two channels of a rotation are adjacent in q and k; in
            the engine they are half a head apart.
        norm_offset: how much larger norm weights are than in a checkpoint.
        optional: further optional keys of config.json, in addition to `_OPTIONAL`.
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
    """Return the architecture of a file.

    Raises:
        ValueError: it is not supported, or the file is part of a split model; names
            both.
    """
    name = header.values.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise ValueError(
            f"{header.path}: general.architecture {shown(name)} is not served; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    parts = ConfigValues(header.path, header.values, keys=_FILE_KEYS).get("split.count")
    if parts > 1:
        raise ValueError(
            f"{header.path}: one of {parts} parts of a model (split.count); merge the "
            "parts into one file first"
        )
    return known


def gguf_config(path: Path) -> dict[str, Any]:
    """Return the contents that `config.json` would have.

    Raises:
        ValueError: the architecture is not supported, or a value is missing, not
            allowed, or contradicted by the tensors; names file and key.
    """
    header = read_gguf_header(path)
    known = gguf_architecture(header)
    prefix = header.values["general.architecture"]
    values = _values(header, known)
    config: dict[str, Any] = {"architectures": [known.model]} | known.config
    for name, suffix in _SIZES.items():
        config[name] = values.get(f"{prefix}.{suffix}")
    # A missing value means the family's default; null would mean none.
    for name, suffix in (_OPTIONAL | known.optional).items():
        if (value := values.get(f"{prefix}.{suffix}")) is not None:
            config[name] = value
    if "vocab_size" not in config:
        config["vocab_size"] = len(values.get("tokenizer.ggml.tokens"))
    config |= _gemma_scalar(config)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["eos_token_id"] = _end_tokens(values)
    config["rope_scaling"] = gguf_rope_scaling(header, values, prefix, config)
    _check_sizes(header, values, prefix, config)
    return config


def gguf_heads(header: GgufHeader) -> dict[str, int]:
    """Return the heads of the projections q and k, by their module names in the file.

    Raises:
        ValueError: a value is missing or not allowed.
    """
    values = _values(header, gguf_architecture(header))
    prefix = header.values["general.architecture"]
    heads = values.get(f"{prefix}.attention.head_count")
    kv_heads = values.get(f"{prefix}.attention.head_count_kv") or heads
    return {"attn_q": heads, "attn_k": kv_heads}


_FILE_KEYS = {"split.count": Key(int, 0, 1 << 16, 1)}
_TOKEN_ID = Key(int, 0, MAX_TOKEN_ID)


def _values(header: GgufHeader, known: GgufArchitecture) -> ConfigValues:
    """Return the values read from the file, checked under their names in the file."""
    prefix = header.values["general.architecture"]
    sizes = {
        f"{prefix}.{suffix}": KEYS[name]._replace(default=REQUIRED)
        for name, suffix in _SIZES.items()
    }
    optional = {
        f"{prefix}.{suffix}": KEYS[name]._replace(default=None)
        for name, suffix in (_OPTIONAL | known.optional).items()
    }
    scaling = f"{prefix}.rope.scaling."
    return ConfigValues(
        header.path,
        header.values,
        keys=sizes
        | optional
        | {
            "tokenizer.ggml.tokens": Key(list, default=REQUIRED),
            "tokenizer.ggml.eos_token_id": _TOKEN_ID,
            "tokenizer.ggml.eot_token_id": _TOKEN_ID,
            f"{scaling}type": Key(str, default="none"),
            f"{scaling}factor": ROPE_KEYS["factor"],
            f"{scaling}original_context_length": ROPE_KEYS[
                "original_max_position_embeddings"
            ]._replace(default=None),
        },
    )


def _check_sizes(
    header: GgufHeader, values: ConfigValues, prefix: str, config: dict[str, Any]
) -> None:
    """Compare the sizes with the tensors before memory is allocated for them."""
    blocks = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if config["num_hidden_layers"] > len(blocks):
        raise values.wrong(
            f"{prefix}.block_count", f"must be {len(blocks)}, as many as have tensors"
        )
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    for tensor, dim, name, suffix in (
        ("token_embd", 0, "vocab_size", "vocab_size"),
        ("token_embd", 1, "hidden_size", "embedding_length"),
        ("blk.0.ffn_up", 0, "intermediate_size", "feed_forward_length"),
        ("blk.0.attn_q", 0, "num_attention_heads", "attention.head_count"),
        ("blk.0.attn_k", 0, "num_key_value_heads", "attention.head_count_kv"),
    ):
        shape = _matrix(header, f"{tensor}.weight")
        size = config.get(name, num_heads)
        if name.endswith("heads"):
            size *= head_dim
        if size != shape[dim]:
            raise values.error(
                f"{prefix}.{suffix}",
                f"asks for {size} in {tensor}.weight, which has {shape[dim]}",
            )


def _matrix(header: GgufHeader, name: str) -> tuple[int, ...]:
    tensor = header.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        has = "is missing" if tensor is None else f"has the shape {tensor.shape}"
        raise ValueError(f"{header.path}: tensor {name} {has}; it must be a matrix")
    return tensor.shape


def _gemma_scalar(config: dict[str, Any]) -> dict[str, Any]:
    """Return `query_pre_attn_scalar`, which files lack: the width of a head, except for
    the one Gemma size whose heads do not have 256 channels (27B).
    """
    is_gemma = config.get("model_type") == "gemma3_text"
    if not is_gemma or config.get("head_dim", 256) == 256:
        return {}
    scalar = config["hidden_size"] / config["num_attention_heads"]
    return {"query_pre_attn_scalar": scalar}


def _end_tokens(values: ConfigValues) -> list[int]:
    names = ("eos_token_id", "eot_token_id")
    ids = (values.get(f"tokenizer.ggml.{name}") for name in names)
    return sorted({token_id for token_id in ids if token_id is not None})
