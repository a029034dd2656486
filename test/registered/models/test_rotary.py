"""Rotary tables and layer types equal those that transformers reads from one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang.srt.configs.layer_types import FULL, SLIDING
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import (
    build_cos_sin_cache,
    shared_cos_sin_cache,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_models import FAMILIES, TINY

register_cpu_ci(est_time=4, suite="cpu")

ROWS = 300
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5},
    "llama3": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
    | LLAMA3
    | {"original_max_position_embeddings": 32},
    "yarn": YARN | {"original_max_position_embeddings": 64},
    "yarn of the model's own context": YARN,
    "yarn, betas": YARN | {"beta_fast": 20.0, "beta_slow": 2.5},
    "yarn of gpt-oss": YARN
    | {"rope_theta": 150000.0, "factor": 32.0, "truncate": False}
    | {"original_max_position_embeddings": 4096},
    "yarn with a factor": YARN | {"attention_factor": 1.7},
    "yarn of DeepSeek": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn with one mscale": YARN | {"mscale": 0.5},
    "yarn that narrows": YARN | {"factor": 0.5},
    "yarn without a ramp": YARN | {"original_max_position_embeddings": 2},
    "linear, partial": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    | {"partial_rotary_factor": 0.5},
    "yarn, partial": YARN | {"partial_rotary_factor": 0.25},
}


def write_config(folder: Path, **changes: Any) -> Path:
    config = TINY | FAMILIES["LlamaForCausalLM"]
    config |= {"architectures": ["LlamaForCausalLM"], "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def table_of(inv_freq: Tensor, factor: float) -> Tensor:
    angles = torch.outer(torch.arange(ROWS).float(), inv_freq.float())
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def assert_tables_equal(actual: Tensor, expected: Tensor) -> None:
    # The last bit of a frequency is worth 1e-5 of an angle of some hundred.
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_tables_equal_those_of_transformers(
    tmp_path: Path, name: str, spelling: str
) -> None:
    numbers = dict(SCALINGS[name])
    folder = write_config(tmp_path, rope_parameters=numbers)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[numbers["rope_type"]](theirs, "cpu")
    if spelling == "rope_scaling":
        top = {"rope_theta": numbers.pop("rope_theta")}
        if share := numbers.pop("partial_rotary_factor", None):
            top["partial_rotary_factor"] = share
        numbers["type"] = numbers.pop("rope_type")
        write_config(tmp_path, rope_scaling=numbers, **top)
    config = ModelConfig.from_path(folder)
    assert set(config.ropes) == {FULL}
    table = build_cos_sin_cache(config.rope, head_dim=64, rows=ROWS)
    assert_tables_equal(table, table_of(inv_freq, factor))


def test_tables_of_equal_numbers_are_shared_and_of_others_are_not(
    tmp_path: Path,
) -> None:
    def table(**numbers: Any) -> Tensor:
        config = ModelConfig.from_path(write_config(tmp_path, **numbers))
        return shared_cos_sin_cache(config.rope, head_dim=64, rows=16)

    assert table(rope_theta=77.0) is table(rope_theta=77.0)
    half = table(rope_theta=77.0, partial_rotary_factor=0.5)
    assert half.shape == (16, 32) and table(rope_theta=77.0).shape == (16, 64)


GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
}
NESTED = {
    FULL: {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
    SLIDING: {"rope_type": "default", "rope_theta": 2e4},
}
# Fields of config.json beside the sizes.
LAYERED: dict[str, dict[str, Any]] = {
    "gemma 3, nested": GEMMA3 | {"rope_parameters": NESTED},
    "gemma 3, older": GEMMA3
    | {"sliding_window": 512, "sliding_window_pattern": 3}
    | {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma 3, defaults": GEMMA3,
    "gemma 2, defaults": {"model_type": "gemma2", "num_hidden_layers": 5},
    "gpt-oss, defaults": {"model_type": "gpt_oss", "num_hidden_layers": 3},
    "gpt-oss": {"model_type": "gpt_oss", "num_hidden_layers": 3, "rope_scaling": YARN},
    "qwen2, window": {
        "model_type": "qwen2",
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 3,
    },
    "qwen2, off": {"model_type": "qwen2", "sliding_window": 40},
    "qwen2, all layers before": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
    },
    "qwen3, named": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 40,
        "layer_types": [SLIDING, FULL],
    },
}


@pytest.mark.parametrize("name", LAYERED)
def test_layers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_config(tmp_path, **LAYERED[name])
    theirs = transformers.AutoConfig.from_pretrained(folder)
    config = ModelConfig.from_path(folder)
    assert list(config.layer_types) == list(theirs.layer_types)
    has_window = SLIDING in theirs.layer_types
    assert config.sliding_window == (theirs.sliding_window if has_window else None)
    for layer, layer_type in enumerate(theirs.layer_types):
        is_sliding = layer_type == SLIDING
        window = theirs.sliding_window if is_sliding else None
        assert config.layer_window(layer) == window
    scalar = getattr(theirs, "query_pre_attn_scalar", config.head_dim)
    assert config.attention_scale == pytest.approx(scalar**-0.5)
    for ours, key in (
        (config.attention_logit_cap, "attn_logit_softcapping"),
        (config.final_logit_cap, "final_logit_softcapping"),
    ):
        assert ours == (getattr(theirs, key, None) or 0.0)
    for layer_type, rope in config.ropes.items():
        given = theirs.rope_parameters
        given = given.get(layer_type, given)
        assert (rope.rope_type, rope.theta) == (given["rope_type"], given["rope_theta"])
        if rope.rope_type == "linear":
            assert rope.scaling == {"factor": given["factor"]}


def test_a_window_without_more_is_that_of_all_layers(tmp_path: Path) -> None:
    """Mistral 7B v0.1 says no more; a null window is none."""
    mistral = {"model_type": "mistral", "num_hidden_layers": 3}
    for given, window in (({"sliding_window": 9}, 9), ({}, 4096)):
        config = ModelConfig.from_path(write_config(tmp_path, **mistral, **given))
        assert config.layer_types == (SLIDING,) * 3
        assert config.sliding_window == config.layer_window(2) == window
    folder = write_config(tmp_path, **mistral, sliding_window=None)
    config = ModelConfig.from_path(folder)
    assert config.layer_types == (FULL,) * 3 and config.sliding_window is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
