"""Rotary embeddings described in `config.json`, one for each type of layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang.srt.configs.config_values import ROPE_KEYS
from sglang.srt.configs.layer_types import LAYER_TYPES, SLIDING
from sglang.srt.utils.checked_values import ConfigValues, Key
from sglang.srt.utils.json_file import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding.

    `rope_type` is default, linear, llama3 or yarn; `scaling` holds that type's numbers,
    with flags as 0 or 1. The first `rotary_share` of a head's channels are rotated.
    """

    theta: float
    rope_type: str = "default"
    scaling: dict[str, float] = field(default_factory=dict)
    rotary_share: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Number of rotated channels of a head; even."""
        return int(head_dim * self.rotary_share)


# Numbers used by a type; the ones in `ROPE_KEYS` without a default are required.
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
    ),
}


def rope_configs(
    values: ConfigValues, *, layer_types: Iterable[str], head_dim: int
) -> dict[str, RopeConfig]:
    """Read the rotary embedding of every type in `layer_types`.

    Reads `rope_parameters`, flat or by layer type, or `rope_theta` and `rope_scaling`,
    optionally with `rope_local_base_freq`, the base of sliding layers, which are not
    scaled (Gemma 3).

    Raises:
        ValueError: a value is missing or impossible; names the file and the key.
    """
    return {
        layer_type: _read_rope(values, layer_type, head_dim)
        for layer_type in sorted(set(layer_types))
    }


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on cosines and sines, or on q and k (Peng et al., 2023,
    3.4).
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_rope(values: ConfigValues, layer_type: str, head_dim: int) -> RopeConfig:
    theta, native = values.get("rope_theta"), values.get("max_position_embeddings")
    local_theta = values.get("rope_local_base_freq")
    if layer_type != SLIDING:
        local_theta = None
    name, numbers = _numbers(values, layer_type)
    rope_type = numbers.get("rope_type") or numbers.get("type")
    needed = _ROPE_NUMBERS.get(rope_type)
    if needed is None:
        raise values.error(
            name,
            f"has the type {shown(rope_type)}, which is not supported; supported: "
            f"{', '.join(_ROPE_NUMBERS)}",
        )
    scaling = {number: float(numbers.get(number)) for number in needed}
    if rope_type == "llama3" and (
        scaling["low_freq_factor"] >= scaling["high_freq_factor"]
    ):
        raise numbers.wrong("low_freq_factor", "must be below high_freq_factor")
    if rope_type == "yarn" and scaling["beta_slow"] >= scaling["beta_fast"]:
        raise numbers.wrong("beta_slow", "must be below beta_fast")
    if rope_type == "yarn":
        scaling |= _yarn_numbers(numbers, scaling, context=native)
    share = numbers.get("partial_rotary_factor") or values.get("partial_rotary_factor")
    theta = numbers.get("rope_theta") or local_theta or theta
    if rope_type == "yarn" and theta <= 1:
        raise values.error("rope_theta", f"is {theta:g}; yarn needs more than 1")
    config = RopeConfig(
        theta=theta,
        rope_type=rope_type,
        scaling=scaling,
        rotary_share=share,
    )
    rotated = config.rotary_dim(head_dim)
    if rotated < 2 or rotated % 2:
        raise values.error(
            "partial_rotary_factor",
            f"is {share:g}, which rotates {rotated} of {head_dim} channels of a head; "
            "it must be an even number, at least 2",
        )
    return config


def _numbers(values: ConfigValues, layer_type: str) -> tuple[str, ConfigValues]:
    """Return the key of a layer type's parameters, and the parameters."""
    given = values.get("rope_parameters")
    if given and any(name in given for name in LAYER_TYPES):
        nested = values.within("rope_parameters", _NESTED_KEYS)
        name = f"rope_parameters.{layer_type}"
        return name, nested.within(layer_type, ROPE_KEYS)
    # Scaling does not apply to layers with their own base.
    is_plain = layer_type == SLIDING and values.get("rope_local_base_freq") is not None
    name = "rope_parameters" if given or is_plain else "rope_scaling"
    return name, values.within(name, ROPE_KEYS)


_NESTED_KEYS = {name: Key(dict) for name in LAYER_TYPES}


def _yarn_numbers(
    numbers: ConfigValues, scaling: dict[str, float], *, context: int
) -> dict[str, float]:
    """Return YaRN's numbers without constant defaults; `context` is the model's
    context.

    `attention_factor` multiplies cosines and sines. It is given explicitly, or is the
    ratio of both mscales (DeepSeek), or 0.1 ln(factor) + 1.
    """
    old_context = numbers.get("original_max_position_embeddings", default=context)
    factor, given = scaling["factor"], numbers.get("attention_factor")
    mscale, mscale_all = scaling["mscale"], scaling["mscale_all_dim"]
    if given is None and mscale and mscale_all:
        given = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return {
        "original_max_position_embeddings": old_context,
        "attention_factor": yarn_mscale(factor) if given is None else given,
    }
