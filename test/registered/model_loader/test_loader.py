"""Loading weights: shards, ties, dummies, and errors that name what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import load_model
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=6, suite="cpu")

LLAMA = "LlamaForCausalLM"


def load(folder, load_format="auto"):
    return load_model(
        ModelConfig.from_path(folder),
        load_format=load_format,
        dtype=torch.float32,
        rope_rows=64,
    )


def last_logits(folder, **args):
    harness = ForwardHarness(folder, **args)
    row = harness.new_row([1, 2, 3])
    return harness.extend([(row, 3)])[0]


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def test_sharded_checkpoint_equals_the_whole_one(tmp_path):
    whole = write_tiny_model(tmp_path / "whole", LLAMA)
    sharded = write_tiny_model(tmp_path / "sharded", LLAMA)
    weights = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    weight_map = {}
    for part in range(3):
        name = f"model-{part + 1:05}-of-00003.safetensors"
        names = sorted(weights)[part::3]
        save_file({n: weights[n] for n in names}, sharded / name)
        weight_map |= dict.fromkeys(names, name)
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(last_logits(whole), last_logits(sharded))
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00003"):
        load(sharded)


def test_tied_head_uses_the_embedding(tmp_path):
    folder = write_tiny_model(tmp_path, LLAMA, tie_word_embeddings=True)
    tied = last_logits(folder)
    edit_weights(
        folder,
        lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
    )
    assert torch.equal(tied, last_logits(folder))  # a redundant head is ignored
    edit_config(folder, tie_word_embeddings=False)
    torch.testing.assert_close(tied, last_logits(folder))


def test_dummy_weights_need_no_files_and_do_not_change(tmp_path):
    folder = write_tiny_model(tmp_path, LLAMA)
    (folder / "model.safetensors").unlink()
    logits = last_logits(folder, load_format="dummy")
    assert torch.isfinite(logits).all() and logits.std() > 0
    assert torch.equal(logits, last_logits(folder, load_format="dummy"))
    with pytest.raises(ValueError, match="--load-format dummy"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor_is_named(tmp_path, name):
    folder = write_tiny_model(tmp_path, LLAMA)
    edit_weights(folder, lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=name):
        load(folder)


def test_unknown_tensor_is_named(tmp_path):
    folder = write_tiny_model(tmp_path, LLAMA)
    edit_weights(folder, lambda w: w.update({"model.layers.7.x": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"model\.layers\.7\.x"):
        load(folder)


def test_recomputed_buffers_are_ignored(tmp_path):
    folder = write_tiny_model(tmp_path, LLAMA)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda w: w.update({name: torch.zeros(8)}))
    load(folder)


def test_wrong_shape_names_both_shapes(tmp_path):
    folder = write_tiny_model(tmp_path, LLAMA)
    edit_config(folder, intermediate_size=80)
    with pytest.raises(ValueError, match=r"down_proj.*\(64, 96\).*\(64, 80\)"):
        load(folder)


def test_damaged_file_is_named(tmp_path):
    folder = write_tiny_model(tmp_path, LLAMA)
    (folder / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(folder)


def test_pickled_weights_are_not_read(tmp_path):
    folder = write_tiny_model(tmp_path, LLAMA)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"hidden_size": "big"}, "hidden_size.*.big."),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*silu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope.*llama3.*yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is missing"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path, changes, words):
    folder = write_tiny_model(tmp_path, LLAMA)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=words):
        load(folder)


def test_context_length_beyond_the_model_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path, LLAMA)
    assert ModelConfig.from_path(folder, context_length=100).context_len == 100
    with pytest.raises(ValueError, match=r"--context-length 300.*256"):
        ModelConfig.from_path(folder, context_length=300)


def test_eos_ids_of_both_files_are_joined(tmp_path):
    folder = write_tiny_model(tmp_path, LLAMA)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [256, 260]}))
    assert ModelConfig.from_path(folder).eos_token_ids == (256, 260)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
