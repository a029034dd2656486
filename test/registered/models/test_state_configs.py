"""What config.json says of layers with a recurrent state, beside transformers'
configuration classes, and errors that name file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from sglang.srt.configs.config_values import KEYS
from sglang.srt.configs.layer_types import CONV, FULL, LINEAR
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.ops.state.short_conv.conv_filter import WIDTHS
from sglang.srt.models.registry import create_model
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

LFM2 = "Lfm2ForCausalLM"
NEXT = "Qwen3NextForCausalLM"
# Model type -> the class that reads it.
ARCHITECTURES = {
    "lfm2": LFM2,
    "qwen3_next": NEXT,
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
# Their fields -> ours.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "context_len",
    "tie_word_embeddings": "tie_word_embeddings",
}
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
SIZES |= {"vocab_size": 264, "num_hidden_layers": 4}


def read(folder: Path, model_type: str, **values: Any) -> ModelConfig:
    raw = {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]]}
    (folder / "config.json").write_text(json.dumps(raw | values))
    return ModelConfig.from_path(folder)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_defaults_are_those_of_the_family(tmp_path: Path, model_type: str) -> None:
    """An empty config.json is the family's first model."""
    theirs: Any = transformers.AutoConfig.for_model(model_type)
    ours = read(tmp_path, model_type)
    if model_type == "lfm2":
        # Transformers' default has no convolutions.
        assert ours.layer_types == (FULL,) * 32
        ours = read(tmp_path, model_type, full_attn_idxs=[*range(32)])
    assert list(ours.layer_types) == theirs.layer_types
    for name, own in FIELDS.items():
        assert getattr(ours, own) == getattr(theirs, name), name
    rope = ours.ropes[FULL]
    assert [*ours.ropes] == [FULL]
    assert rope.theta == theirs.rope_parameters["rope_theta"]
    share = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert rope.rotary_share == share
    assert ours.rms_norm_eps == getattr(theirs, "norm_eps", None) or theirs.rms_norm_eps
    moe = ours.moe
    assert (moe is not None) == hasattr(theirs, "num_experts")
    if moe is not None:
        assert moe.num_experts == theirs.num_experts
        assert moe.top_k == theirs.num_experts_per_tok
        assert moe.intermediate_size == theirs.moe_intermediate_size
        assert moe.shared_intermediate_size == theirs.shared_expert_intermediate_size
        assert moe.norm_topk_prob
    state = ours.state
    if state is not None:
        assert state.delta is not None
        assert state.conv_width == theirs.linear_conv_kernel_dim
        assert state.delta.heads == theirs.linear_num_value_heads
        assert state.delta.key_heads == theirs.linear_num_key_heads
        assert state.delta.d_k == theirs.linear_key_head_dim
        assert state.delta.d_v == theirs.linear_value_head_dim
        assert state.conv_channels == 2 * 16 * 128 + 32 * 128


@pytest.mark.parametrize(
    ("model_type", "values", "types"),
    [
        ("lfm2", {"layer_types": [CONV, FULL, CONV, FULL]}, "cfcf"),
        ("lfm2", {"full_attn_idxs": [3]}, "cccf"),
        # Newer checkpoints have both.
        ("lfm2", {"full_attn_idxs": [3], "layer_types": [FULL] * 4}, "ffff"),
        ("qwen3_next", {}, "lllf"),
        ("qwen3_next", {"full_attention_interval": 2}, "lflf"),
        ("qwen3_next", {"layer_types": [LINEAR, FULL, FULL, LINEAR]}, "lffl"),
        ("qwen3_5_text", {"full_attention_interval": 1}, "ffff"),
    ],
)
def test_layers_that_attend_and_layers_with_a_state(
    tmp_path: Path, model_type: str, values: dict[str, Any], types: str
) -> None:
    config = read(tmp_path, model_type, **SIZES, **values)
    assert "".join(name[0] for name in config.layer_types) == types
    assert config.attention_layers == tuple(i for i in range(4) if types[i] == "f")
    others = tuple(i for i in range(4) if types[i] != "f")
    assert (config.state.layers if config.state else ()) == others
    assert [*config.ropes] == [FULL]


@pytest.mark.parametrize(
    "values",
    [
        {"intermediate_size": 96},
        {"block_ff_dim": 1000, "intermediate_size": 96},
        {"block_ff_dim": 1000, "block_multiple_of": 7},
        {"block_ff_dim": 1000, "block_ffn_dim_multiplier": 1.3},
        {"block_ff_dim": 1000, "block_auto_adjust_ff_dim": False},
    ],
)
def test_lfm2_rounds_its_feed_forward_blocks(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    theirs = transformers.Lfm2Config(**SIZES, full_attn_idxs=[3], **values)
    block = transformers.Lfm2ForCausalLM(theirs).model.layers[0].feed_forward
    ours = read(tmp_path, "lfm2", **SIZES, full_attn_idxs=[3], **values)
    assert ours.intermediate_size == block.w1.weight.shape[0]


def test_lfm2_has_names_of_its_own(tmp_path: Path) -> None:
    values = {"norm_eps": 1e-4, "rms_norm_eps": 1e-6, "tie_embedding": False}
    config = read(tmp_path, "lfm2", **SIZES, **values)
    assert config.rms_norm_eps == 1e-4
    assert not config.tie_word_embeddings


def test_a_model_whose_layers_all_have_experts_needs_no_dense_size(
    tmp_path: Path,
) -> None:
    assert read(tmp_path, "qwen3_5_moe_text", **SIZES).intermediate_size == 512
    with pytest.raises(ValueError, match="intermediate_size is missing"):
        read(tmp_path, "qwen3_5_moe_text", **SIZES, mlp_only_layers=[0])


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next", "qwen3_5_text"])
def test_the_count_of_weights_is_a_lower_bound(tmp_path: Path, model_type: str) -> None:
    values = SIZES | {"layer_types": [CONV if model_type == "lfm2" else LINEAR, FULL]}
    values |= {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    values |= {"moe_intermediate_size": 32, "intermediate_size": 96}
    theirs = transformers.AutoConfig.for_model(model_type, **values)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    ours = read(tmp_path, model_type, **values)
    if model_type != "qwen3_next":
        ours = ours.without_experts()
    matrices = sum(
        weight.numel()
        for name, weight in model.model.layers.named_parameters()
        if weight.dim() > 1
    )
    assert 0.8 * matrices < ours.num_layer_weights <= matrices


def test_widths_are_those_of_the_operation() -> None:
    for name in ("conv_L_cache", "linear_conv_kernel_dim"):
        key = KEYS[name]
        assert range(int(key.low), int(key.high) + 1) == WIDTHS


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        (
            "lfm2",
            {"layer_types": [CONV] * 4},
            "layer_types leaves none of the 4 layers",
        ),
        ("lfm2", {"layer_types": [CONV, FULL]}, "layer_types names 2 layers"),
        ("lfm2", {"layer_types": [CONV, "mamba", FULL, CONV]}, 'names "mamba", which'),
        ("lfm2", {"layer_types": [[], FULL, FULL, FULL]}, r"names \[\], which"),
        (
            "lfm2",
            {"layer_types": [CONV, LINEAR, FULL, FULL]},
            "layer_types names conv and linear_attention; all layers",
        ),
        ("lfm2", {"full_attn_idxs": [1, 4]}, "full_attn_idxs names layer 4, but"),
        ("lfm2", {"full_attn_idxs": []}, "full_attn_idxs leaves none of the 4"),
        ("lfm2", {"full_attn_idxs": [-1]}, r"full_attn_idxs\[0\] must be from 0"),
        ("lfm2", {"full_attn_idxs": [1], "conv_L_cache": 5}, "conv_L_cache must be"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of must be from 1"),
        (
            "qwen3_next",
            {"full_attention_interval": 5},
            "full_attention_interval leaves none of the 4 layers",
        ),
        (
            "qwen3_next",
            {"linear_num_key_heads": 3},
            "linear_num_key_heads must divide linear_num_value_heads, 32, got 3",
        ),
        ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim must be from"),
        (
            "qwen3_next",
            {"linear_conv_kernel_dim": 8},
            "linear_conv_kernel_dim must be from 2 to 4, got 8",
        ),
        (
            "qwen3_5_text",
            {"partial_rotary_factor": 0.02},
            "partial_rotary_factor is 0.02, which rotates 5 of 256",
        ),
    ],
)
def test_errors_name_file_and_key(
    tmp_path: Path, model_type: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, model_type, **SIZES, **values)
    assert str(tmp_path / "config.json") in str(error.value)


def test_sizes_without_a_default_are_required(tmp_path: Path) -> None:
    raw = SIZES | {"architectures": [NEXT], "intermediate_size": 96}
    raw |= {"layer_types": [LINEAR, FULL] * 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="linear_num_value_heads is missing"):
        ModelConfig.from_path(tmp_path)


def test_a_class_refuses_layers_that_it_does_not_have(tmp_path: Path) -> None:
    raw = SIZES | {"architectures": ["LlamaForCausalLM"], "intermediate_size": 96}
    raw |= {"layer_types": [CONV, FULL] * 2, "conv_L_cache": 3}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_path(tmp_path)
    with pytest.raises(ValueError, match="layers of the type conv, which LlamaFor"):
        create_model(config, rope_rows=8)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
