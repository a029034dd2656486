"""A model's shape as the engine needs it, read from `config.json` without torch.

Owns the reading of Hugging Face configuration files. Knows nothing of modules or
weights.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_CONTEXT_LENGTH = 2048


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
    attention. `raw` is the content of config.json, for fields of a single model.
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
        raw = _read_json(folder / "config.json")
        native = int(raw.get("max_position_embeddings", DEFAULT_CONTEXT_LENGTH))
        if context_length is not None and context_length > native:
            raise ValueError(
                f"--context-length {context_length} exceeds the {native} positions "
                f"(max_position_embeddings) of {folder}; use at most {native}"
            )
        architectures = raw.get("architectures") or []
        if len(architectures) != 1:
            raise ValueError(
                f"{folder / 'config.json'}: architectures must name one model class, "
                f"got {architectures}"
            )

        def need(name: str) -> int:
            if not isinstance(raw.get(name), int):
                raise ValueError(
                    f"{folder / 'config.json'}: {name} must be an integer, got "
                    f"{raw.get(name)!r}"
                )
            return int(raw[name])

        hidden_size = need("hidden_size")
        num_heads = need("num_attention_heads")
        return cls(
            path=folder,
            architecture=architectures[0],
            hidden_size=hidden_size,
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
            vocab_size=need("vocab_size"),
            context_len=context_length or native,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            hidden_act=str(raw.get("hidden_act", "silu")),
            rope=_rope_config(raw, folder),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            sliding_window=_sliding_window(raw),
            eos_token_ids=_eos_token_ids(raw, folder),
            raw=raw,
        )

    def with_context(self, context_len: int) -> ModelConfig:
        """Return the same model with another context length."""
        return dataclasses.replace(self, context_len=context_len)

    def with_architecture(self, architecture: str) -> ModelConfig:
        """Return the same shape for another model class."""
        return dataclasses.replace(self, architecture=architecture)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return value


def _rope_config(raw: dict[str, Any], folder: Path) -> RopeConfig:
    """Read either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    numbers = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(numbers.pop("rope_theta", raw.get("rope_theta", 10000.0)))
    rope_type = str(numbers.pop("rope_type", numbers.pop("type", "default")))
    needed = _ROPE_NUMBERS.get(rope_type)
    if needed is None:
        raise ValueError(
            f"{folder / 'config.json'}: rope type {rope_type!r} is not supported; "
            f"supported: {', '.join(_ROPE_NUMBERS)}"
        )
    missing = [name for name in needed if name not in numbers]
    if missing:
        raise ValueError(
            f"{folder / 'config.json'}: rope type {rope_type} lacks "
            f"{', '.join(missing)}"
        )
    scaling = {name: float(numbers[name]) for name in needed}
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


def _sliding_window(raw: dict[str, Any]) -> int | None:
    """Return the window; Qwen's has no effect unless `use_sliding_window` is true."""
    window = raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", True):
        return None
    return int(window)


def _eos_token_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    generation = folder / "generation_config.json"
    sources = [raw, _read_json(generation)] if generation.is_file() else [raw]
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                ids[int(token_id)] = None
    return tuple(ids)
