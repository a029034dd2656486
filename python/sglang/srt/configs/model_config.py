"""A model's shape as the engine needs it, read from `config.json` without torch.

Owns the reading of Hugging Face configuration files. Knows nothing of modules or
weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.configs.config_values import (
    QUANTIZATION_KEYS,
    ROPE_KEYS,
    ConfigValues,
)
from sglang.srt.configs.moe_config import MoeConfig, read_moe_config
from sglang.srt.utils.json_file import read_json_object, shown

MAX_TOKEN_ID = 1 << 31
QUANT_METHODS = ("mxfp4",)
"""Formats of quantised weights that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding.

    `rope_type` is default, linear or llama3; `scaling` holds the numbers of that type.
    """

    theta: float
    rope_type: str = "default"
    scaling: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a model.

    Sizes are in channels, heads or layers; `context_len` is in tokens. `eos_token_ids`
    joins config.json and generation_config.json. `sliding_window` None means full
    attention, `moe` None that all layers are dense, `quant_method` None that weights
    are stored as floating-point numbers. `raw` is the content of config.json, for
    fields of a single model.
    """

    path: Path
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    rms_norm_eps: float
    hidden_act: str
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    moe: MoeConfig | None
    quant_method: str | None
    eos_token_ids: tuple[int, ...]
    raw: dict[str, Any]

    @classmethod
    def from_folder(
        cls, folder: Path, *, context_length: int | None = None
    ) -> ModelConfig:
        """Read `folder/config.json`.

        Raises:
            ValueError: a missing or malformed file or field, or a `context_length`
                beyond the model's own; names the file and the field.
        """
        file = folder / "config.json"
        raw = read_json_object(file)
        values = ConfigValues(file, raw)
        native = values.get("max_position_embeddings")
        if context_length is not None and context_length > native:
            raise ValueError(
                f"--context-length {context_length} exceeds the {native} positions "
                f"(max_position_embeddings) of {folder}; use at most {native}"
            )
        return cls(
            path=folder,
            architecture=_architecture(values, raw),
            hidden_size=values.get("hidden_size"),
            intermediate_size=values.get("intermediate_size"),
            num_layers=values.get("num_hidden_layers"),
            **_head_sizes(values),
            vocab_size=values.get("vocab_size"),
            context_len=context_length or native,
            rms_norm_eps=values.get("rms_norm_eps"),
            hidden_act=values.get("hidden_act"),
            rope=_rope_config(values),
            tie_word_embeddings=values.get("tie_word_embeddings"),
            attention_bias=values.get("attention_bias"),
            mlp_bias=values.get("mlp_bias"),
            sliding_window=_sliding_window(values),
            moe=read_moe_config(values),
            quant_method=_quant_method(values),
            eos_token_ids=_eos_token_ids(values, folder),
            raw=raw,
        )

    @property
    def values(self) -> ConfigValues:
        """Checked values of config.json, for keys of a single model."""
        return ConfigValues(self.path / "config.json", self.raw)

    @property
    def num_layer_weights(self) -> int:
        """Weights of the layers' matrices: at least so many does a model have."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * heads * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        total = self.num_layers * (attention + mlp)
        if self.moe is None:
            return total
        sparse = len(self.moe.layers)
        return total + sparse * (self.moe.num_weights(self.hidden_size) - mlp)

    def without_experts(self) -> ModelConfig:
        """Return the shape for a model that ignores the fields of experts: a draft
        head may have copied them from its target."""
        return dataclasses.replace(self, moe=None)

    def with_context(self, context_len: int) -> ModelConfig:
        """Return the same model with another context length."""
        return dataclasses.replace(self, context_len=context_len)

    def with_architecture(self, architecture: str) -> ModelConfig:
        """Return the same shape for another model class."""
        return dataclasses.replace(self, architecture=architecture)


def _architecture(values: ConfigValues, raw: dict[str, Any]) -> str:
    match raw.get("architectures"):
        case [str(name)]:
            return name
    raise values.wrong("architectures", "must be a list of one model class")


def _head_sizes(values: ConfigValues) -> dict[str, int]:
    """The fields `num_heads`, `num_kv_heads` and `head_dim`, which must fit."""
    hidden_size = values.get("hidden_size")
    num_heads = values.get("num_attention_heads")
    num_kv_heads = values.get("num_key_value_heads") or num_heads
    head_dim = values.get("head_dim")
    if num_heads % num_kv_heads:
        raise values.wrong(
            "num_key_value_heads", f"must divide num_attention_heads, {num_heads}"
        )
    if head_dim is None:
        if hidden_size % num_heads:
            raise values.wrong(
                "num_attention_heads",
                f"must divide hidden_size, {hidden_size}, as head_dim is absent",
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise values.error("head_dim", f"is {head_dim}, but must be even")
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _rope_config(values: ConfigValues) -> RopeConfig:
    """Read either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    numbers = values.within(name, ROPE_KEYS)
    rope_type = numbers.get("rope_type") or numbers.get("type")
    needed = _ROPE_NUMBERS.get(rope_type)
    if needed is None:
        raise values.error(
            name,
            f"has the type {shown(rope_type)}, which is not supported; supported: "
            f"{', '.join(_ROPE_NUMBERS)}",
        )
    scaling = {number: numbers.get(number) for number in needed}
    if rope_type == "llama3" and (
        scaling["low_freq_factor"] >= scaling["high_freq_factor"]
    ):
        raise numbers.wrong("low_freq_factor", "must be below high_freq_factor")
    theta = numbers.get("rope_theta") or values.get("rope_theta")
    return RopeConfig(theta=theta, rope_type=rope_type, scaling=scaling)


_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def _quant_method(values: ConfigValues) -> str | None:
    if values.get("quantization_config") is None:
        return None
    found = values.within("quantization_config", QUANTIZATION_KEYS)
    method: str = found.get("quant_method")
    if method not in QUANT_METHODS:
        raise found.error(
            "quant_method",
            f"is {shown(method)}, which is not supported; supported: "
            f"{', '.join(QUANT_METHODS)}, and checkpoints that are not quantised",
        )
    return method


def _sliding_window(values: ConfigValues) -> int | None:
    """Return the window; Qwen's has no effect unless `use_sliding_window` is true."""
    if not values.get("use_sliding_window"):
        return None
    window: int | None = values.get("sliding_window")
    return window


def _eos_token_ids(values: ConfigValues, folder: Path) -> tuple[int, ...]:
    sources = [values]
    generation = folder / "generation_config.json"
    if generation.is_file():
        sources.append(ConfigValues(generation, read_json_object(generation)))
    ids: dict[int, None] = {}
    for source in sources:
        # Some configurations write -1 for none.
        for token_id in source.integers("eos_token_id", low=-1, high=MAX_TOKEN_ID):
            if token_id >= 0:
                ids[token_id] = None
    return tuple(ids)
