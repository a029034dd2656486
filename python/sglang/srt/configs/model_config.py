"""A model's shape as the engine needs it, read from `config.json` without torch.

Reads Hugging Face configuration files. Knows nothing about modules or weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.config_values import (
    FAMILY_DEFAULTS,
    KEYS,
    MAX_TOKEN_ID,
)
from sglang.srt.configs.gguf_config import gguf_config
from sglang.srt.configs.latent_config import LatentConfig, read_latent_config
from sglang.srt.configs.layer_types import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    read_layer_types,
)
from sglang.srt.configs.moe_config import MoeConfig, read_moe_config
from sglang.srt.configs.quantization_config import (
    QuantizationConfig,
    read_quantization,
)
from sglang.srt.configs.rope_config import RopeConfig, rope_configs
from sglang.srt.configs.state_config import StateConfig, read_state_config
from sglang.srt.utils.checked_values import ConfigValues
from sglang.srt.utils.gguf_header import is_gguf
from sglang.srt.utils.json_file import read_json_object


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a model.

    Sizes are in channels, heads or layers; `context_len` is in tokens. `eos_token_ids`
    joins config.json and generation_config.json. `layer_types` names the type of every
    layer, one of `LAYER_TYPES`; `sliding_attention` reads `sliding_window` positions,
    including the token's own, and None means that there are no such layers. `ropes` has
    the rotary embedding of each type that attends. `attention_scale` is the scale
    factor of attention scores; the caps are 0 if there are none. With a `latent` there
    is one KV head with the stored channels. `state` None means that all layers attend,
    `moe` None that all layers are dense, and `quantization` None that weights are
    stored as floating-point numbers. `path` is a folder or a GGUF file. `raw` is the
    contents of config.json or its equivalent on top of the family's defaults, for
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
    ropes: dict[str, RopeConfig]
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    attention_scale: float
    attention_logit_cap: float
    final_logit_cap: float
    latent: LatentConfig | None
    state: StateConfig | None
    moe: MoeConfig | None
    quantization: QuantizationConfig | None
    eos_token_ids: tuple[int, ...]
    raw: dict[str, Any]

    @classmethod
    def from_path(
        cls,
        path: Path,
        *,
        context_length: int | None = None,
        quantization: str | None = None,
    ) -> ModelConfig:
        """Read the `config.json` of a folder, or the header of a GGUF file.

        Args:
            quantization: value of --quantization; None leaves it to the checkpoint.

        Raises:
            ValueError: a file or field is missing or malformed, `context_length`
                exceeds the model's own, or `quantization` does not fit the checkpoint;
                names the file and the field.
        """
        file = _config_file(path)
        raw = with_family_defaults(text_part(read_raw_config(path)))
        values = ConfigValues(file, raw, keys=KEYS)
        native = values.get("max_position_embeddings")
        if context_length is not None and context_length > native:
            raise ValueError(
                f"--context-length {context_length} exceeds the {native} positions "
                f"(max_position_embeddings) of {path}; use at most {native}"
            )
        latent = read_latent_config(values)
        heads = _head_sizes(values, latent)
        num_layers = values.get("num_hidden_layers")
        layer_types, window = read_layer_types(values, num_layers=num_layers)
        rotated = heads["head_dim"] if latent is None else latent.rope_dim
        attending = [name for name in layer_types if LAYER_TYPES[name].attends]
        ropes = rope_configs(values, layer_types=attending, head_dim=rotated)
        scalar = values.get("query_pre_attn_scalar", default=heads["head_dim"])
        scale = scalar**-0.5
        if latent is not None:
            scale = latent.attention_scale(ropes[FULL])
        moe = read_moe_config(values)
        return cls(
            path=path,
            architecture=_architecture(values, raw),
            hidden_size=values.get("hidden_size"),
            intermediate_size=_intermediate_size(values, moe),
            num_layers=num_layers,
            **heads,
            vocab_size=values.get("vocab_size"),
            context_len=context_length or native,
            rms_norm_eps=values.get("norm_eps", default=values.get("rms_norm_eps")),
            hidden_act=values.get("hidden_activation") or values.get("hidden_act"),
            ropes=ropes,
            tie_word_embeddings=values.get(
                "tie_embedding", default=values.get("tie_word_embeddings")
            ),
            attention_bias=values.get("attention_bias"),
            mlp_bias=values.get("mlp_bias"),
            layer_types=layer_types,
            sliding_window=window,
            attention_scale=scale,
            attention_logit_cap=values.get("attn_logit_softcapping"),
            final_logit_cap=values.get("final_logit_softcapping"),
            latent=latent,
            state=read_state_config(values, layer_types=layer_types),
            moe=moe,
            quantization=read_quantization(values, requested=quantization),
            eos_token_ids=_eos_token_ids(values, path),
            raw=raw,
        )

    @property
    def values(self) -> ConfigValues:
        """Checked values of config.json, for keys of a single model."""
        return ConfigValues(self.file, self.raw, keys=KEYS)

    @property
    def file(self) -> Path:
        """The file the values come from, for errors."""
        return _config_file(self.path)

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding of full attention, or the only one if there are no full
        layers.
        """
        return self.ropes.get(FULL) or self.ropes[SLIDING]

    @property
    def rotated_head_dim(self) -> int:
        """Number of channels of the heads that `ropes` describe."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend and so have KV, ascending."""
        types = enumerate(self.layer_types)
        return tuple(i for i, name in types if LAYER_TYPES[name].attends)

    def layer_window(self, layer: int) -> int | None:
        """Number of positions that a token of this layer attends, including its own, or
        None for all.
        """
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @property
    def num_layer_weights(self) -> int:
        """Number of weights in the layers' matrices, a lower bound for the model."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * heads * self.head_dim
        if self.latent is not None:
            attention = self.latent.num_weights(
                hidden_size=self.hidden_size, num_heads=self.num_heads
            )
        mlp = 3 * self.hidden_size * self.intermediate_size
        total = len(self.attention_layers) * attention + self.num_layers * mlp
        if self.state is not None:
            states = len(self.state.layers)
            total += states * self.state.num_weights(self.hidden_size)
        if self.moe is None:
            return total
        sparse = len(self.moe.layers)
        return total + sparse * (self.moe.num_weights(self.hidden_size) - mlp)

    def without_experts(self) -> ModelConfig:
        """Return the shape of a model that ignores expert fields, because a draft head
        may have copied them from its target.
        """
        return dataclasses.replace(self, moe=None)

    def with_context(self, context_len: int) -> ModelConfig:
        """Return the same model with another context length."""
        return dataclasses.replace(self, context_len=context_len)

    def head(self, architecture: str) -> ModelConfig:
        """Return the shape of a head that predicts further tokens with one layer like
        the last ones here: it attends everything, and has experts if there are any.
        """
        moe = self.moe
        return dataclasses.replace(
            self,
            architecture=architecture,
            num_layers=1,
            layer_types=(FULL,),
            sliding_window=None,
            ropes={FULL: self.rope},
            state=None,
            moe=moe and dataclasses.replace(moe, layers=frozenset({0})),
        )

    def with_architecture(self, architecture: str) -> ModelConfig:
        """Return the same shape for another model class."""
        return dataclasses.replace(self, architecture=architecture)


def read_raw_config(path: Path) -> dict[str, Any]:
    """Return the contents of a folder's `config.json`, or the equivalent from a GGUF
    file.

    Raises:
        ValueError: the file is missing or malformed.
    """
    return gguf_config(path) if is_gguf(path) else read_json_object(_config_file(path))


def _config_file(path: Path) -> Path:
    return path if is_gguf(path) else path / "config.json"


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json for the language model inside a multimodal
    model: its `text_config` on top of the rest, except for the class.
    """
    nested = raw.get("text_config")
    if not isinstance(nested, dict):
        return raw
    return raw | nested | {"architectures": raw.get("architectures")}


def with_family_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json on top of its family's defaults."""
    model_type = raw.get("model_type")
    known = FAMILY_DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}
    return known | raw


def _architecture(values: ConfigValues, raw: dict[str, Any]) -> str:
    match raw.get("architectures"):
        case [str(name)]:
            return name
    raise values.wrong("architectures", "must be a list of one model class")


def _head_sizes(values: ConfigValues, latent: LatentConfig | None) -> dict[str, int]:
    """Return the fields `num_heads`, `num_kv_heads` and `head_dim`, checked for
    consistency.
    """
    hidden_size = values.get("hidden_size")
    num_heads = values.get("num_attention_heads")
    if latent is not None:
        return {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": latent.width}
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


def _intermediate_size(values: ConfigValues, moe: MoeConfig | None) -> int:
    """Return the channels of dense feed-forward blocks.

    If all layers have experts, config.json need not name them (Qwen3.5). LFM2 names
    them before they are multiplied by 2 / 3 and a factor, and rounded up.
    """
    has_dense = moe is None or len(moe.layers) < values.get("num_hidden_layers")
    size: int | None = values.get("block_ff_dim")
    if size is None:
        implied = moe.intermediate_size if moe is not None and not has_dense else None
        size = values.get("intermediate_size", default=implied)
    assert size is not None
    if not values.get("block_auto_adjust_ff_dim"):
        return size
    size = int(values.get("block_ffn_dim_multiplier") * (2 * size // 3))
    multiple: int = values.get("block_multiple_of")
    return -(-size // multiple) * multiple


def _eos_token_ids(values: ConfigValues, folder: Path) -> tuple[int, ...]:
    sources = [values]
    generation = folder / "generation_config.json"
    if generation.is_file():
        raw = read_json_object(generation)
        sources.append(ConfigValues(generation, raw, keys=KEYS))
    ids: dict[int, None] = {}
    for source in sources:
        # Some configurations write -1 for none.
        for token_id in source.integers("eos_token_id", low=-1, high=MAX_TOKEN_ID):
            if token_id >= 0:
                ids[token_id] = None
    return tuple(ids)
