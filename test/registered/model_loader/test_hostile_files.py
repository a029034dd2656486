"""Checkpoints made by anybody: each ends in one line that names file, key and value."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.weight_utils import iterate_weights, tensor_names
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.json_file import shown
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=5, suite="cpu")

LLAMA = "LlamaForCausalLM"
Read = Callable[[Path], object]


def refusal(read: Read, folder: Path) -> str:
    """The one line with which `read` refuses the folder."""
    with pytest.raises(ValueError) as refused:
        read(folder)
    text = str(refused.value)
    assert len(text.splitlines()) == 1 and len(text) < 1000, text
    assert str(folder) in text
    return text


# -- config.json -------------------------------------------------------------------

VALUES: dict[str, list[Any]] = {
    "hidden_size": [None, 0, -64, "64", 64.5, True, [64], {}, 10**18, float("nan")],
    "intermediate_size": [None, -1, "x", 10**18, float("inf")],
    "num_hidden_layers": [None, 0, -2, 10**18, "2", False],
    "num_attention_heads": [None, 0, -4, 10**18, 5],
    "num_key_value_heads": [0, -2, 3, "2", 10**18],
    "head_dim": [0, -16, 10**18, 15, "16"],
    "vocab_size": [None, 0, -1, 10**18, "264"],
    "max_position_embeddings": [0, -1, 10**18, "256", float("nan"), [1]],
    "rms_norm_eps": [-1, "tiny", float("nan"), float("inf"), 10**400],
    "hidden_act": [7, ["silu"]],
    "tie_word_embeddings": ["no", 1],
    "attention_bias": ["false"],
    "mlp_bias": [[]],
    "sliding_window": [0, -5, "wide", 10**18],
    "use_sliding_window": [3],
    "layer_types": ["full_attention", [], ["full_attention"], [1, 2], [None] * 2]
    + [["full_attention", "chunked_attention"], ["sliding_attention"] * 2],
    "sliding_window_pattern": [0, -1, "6"],
    "max_window_layers": [-1, 10**18, "1"],
    "query_pre_attn_scalar": [0, -256, "256", float("nan")],
    "attn_logit_softcapping": [0, -50, float("inf"), "50"],
    "final_logit_softcapping": [0, -30, [30]],
    "partial_rotary_factor": [0, 1.5, -0.5, 0.07, 0.2, "half"],
    "rope_local_base_freq": [0, "1e4"],
    "rope_theta": [0, -1, "1e4", float("nan"), 1e300],
    "rope_scaling": [3, [], "linear", {"rope_type": ["linear"]}, {"type": "yarn"}],
    "rope_parameters": ["x", {"full_attention": 3}]
    + [{"full_attention": {"rope_type": "spiral"}}]
    + [{"full_attention": {"rope_type": "linear"}}],
    "architectures": [None, "LlamaForCausalLM", [], [1], [LLAMA, LLAMA], {"a": 1}],
    "eos_token_id": ["x", [1, "x"], -7, 10**18, {"a": 1}, 1.5, [[1]], True],
}
# Of a model with experts.
MOE_VALUES: dict[str, list[Any]] = {
    "num_experts": [-1, "5", 10**18, 1.5],
    "num_experts_per_tok": [None, 0, -1, 6, "2", 10**18],
    "moe_intermediate_size": [0, -4, "48", 10**18],
    "shared_expert_intermediate_size": [-1, "x", 10**18],
    "norm_topk_prob": [1, "yes"],
    "decoder_sparse_step": [0, -1, 10**18],
    "mlp_only_layers": [[-1], ["0"], [10**18], {"a": 1}, True],
    "first_k_dense_replace": [-1, "1"],
    "n_group": [0, 2, "1"],
    "topk_group": [0, 2],
    "routed_scaling_factor": [0, -1, float("nan")],
}
CASES = [(key, value) for key, values in VALUES.items() for value in values]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), LLAMA)


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("moe"), "Qwen2MoeForCausalLM")


def with_config(model: Path, folder: Path, **changes: Any) -> Path:
    raw = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in MOE_VALUES.items() for value in values],
)
def test_a_value_that_no_model_with_experts_has(
    moe_model: Path, tmp_path: Path, key: str, value: Any
) -> None:
    with_config(moe_model, tmp_path, **{key: value})
    text = refusal(ModelConfig.from_path, tmp_path)
    assert key in text and (value is None or shown(value)[:5] in text), text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"quant_method": "exl2"},
            ["quantization_config.quant_method", "mxfp4", '"exl2"'],
        ),
        ({"quant_method": "gptq", "bits": 3}, ["bits must be 4", "3"]),
        ({"bits": 4}, ["quantization_config.quant_method is missing"]),
        ({"quant_method": 4}, ["quantization_config.quant_method", "4"]),
        ("awq", ["quantization_config must be an object"]),
    ],
)
def test_quantised_weights_that_are_not_read(
    model: Path, tmp_path: Path, value: Any, words: list[str]
) -> None:
    """Refused by the configuration, before any weight is read: there is none here."""
    with_config(model, tmp_path, quantization_config=value)
    text = refusal(ModelConfig.from_path, tmp_path)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(("key", "value"), CASES)
def test_a_value_that_no_model_has(
    model: Path, tmp_path: Path, key: str, value: Any
) -> None:
    text = refusal(ModelConfig.from_path, with_config(model, tmp_path, **{key: value}))
    assert "config.json: " in text and key in text


def test_what_is_absent_or_null_has_its_default(model: Path, tmp_path: Path) -> None:
    optional = [
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_scaling"),
        *("rms_norm_eps", "hidden_act", "sliding_window", "rope_theta"),
    ]
    config = ModelConfig.from_path(
        with_config(model, tmp_path, **dict.fromkeys(optional))
    )
    assert (config.num_kv_heads, config.head_dim, config.context_len) == (4, 16, 2048)
    assert (config.rms_norm_eps, config.rope.theta) == (1e-6, 10000.0)
    # Written by a library that knows floats only.
    wide = with_config(model, tmp_path, hidden_size=64.0, eos_token_id=[-1, 5])
    config = ModelConfig.from_path(wide)
    assert (config.hidden_size, config.eos_token_ids) == (64, (5,))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": float("nan")},
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 4,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn"},
        {"rope_type": "yarn", "factor": 4, "beta_fast": 1},
        {"rope_type": "yarn", "factor": 4, "attention_factor": -1},
        {"rope_type": "yarn", "factor": 4, "truncate": 1},
        {"rope_type": "yarn", "factor": 4, "mscale": float("nan")},
    ],
)
def test_numbers_of_the_rotary_scaling(
    model: Path, tmp_path: Path, scaling: dict[str, Any]
) -> None:
    folder = with_config(model, tmp_path, rope_scaling=scaling)
    assert "rope_scaling." in refusal(ModelConfig.from_path, folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[]", "must hold a JSON object, not []"),
        (b"3", "must hold a JSON object, not 3"),
        (b'"' + b"x" * 10**6 + b'"', " ..."),
        (b"[" * 10**5, "nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 10**5 + b"}", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object(
    model: Path, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    with_config(model, tmp_path)
    (tmp_path / name).write_bytes(content)
    text = refusal(ModelConfig.from_path, tmp_path)
    assert name in text and words in text


def test_a_config_that_is_no_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(ModelConfig.from_path, tmp_path)
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in refusal(ModelConfig.from_path, tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "not a regular file" in refusal(ModelConfig.from_path, tmp_path)


def test_sizes_that_no_memory_holds(model: Path, tmp_path: Path) -> None:
    """Each size is possible, together they are not."""
    folder = with_config(
        model, tmp_path, num_hidden_layers=4096, intermediate_size=1 << 24
    )

    def load(folder: Path) -> None:
        ForwardHarness(folder, load_format="dummy")

    assert "takes at least 49152" in refusal(load, folder)


# -- the files of the weights ------------------------------------------------------

HEADER = "not a valid safetensors file"


def header(text: bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: Any) -> bytes:
    described = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return json.dumps({"a": described}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        header(b"", length=2**63),
        header(b"{}", length=10**9),
        header(b"not json"),
        header(b"[]"),
        header(b"[" * 10**5),
        header(entry()),
        header(entry(), bytes(4)),
        header(entry(), bytes(12)),
        header(entry(shape=[3]), bytes(8)),
        header(entry(shape=[-2]), bytes(8)),
        header(entry(shape=[2**40, 2**40]), bytes(8)),
        header(entry(shape="x"), bytes(8)),
        header(entry(data_offsets=[8, 0]), bytes(8)),
        header(entry(data_offsets=[0, 2**60]), bytes(8)),
        header(entry(dtype="F33"), bytes(8)),
    ],
)
def test_a_shard_that_lies(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    for read in (tensor_names, lambda folder: list(iterate_weights(folder))):
        assert HEADER in refusal(read, tmp_path)


def test_a_truncated_shard(model: Path, tmp_path: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    assert HEADER in refusal(tensor_names, tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    text = refusal(lambda folder: list(iterate_weights(folder)), tmp_path)
    assert "tensor a is in one.safetensors and in two.safetensors" in text


def write_index(folder: Path, name: object) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))


@pytest.mark.parametrize(
    "name",
    [
        *("../other/secret.safetensors", "sub/../../other/secret.safetensors"),
        *("{other}/secret.safetensors", "..", "", "a\x00b", 7, None, ["x"]),
    ],
)
def test_an_index_that_points_elsewhere(tmp_path: Path, name: Any) -> None:
    folder, other = tmp_path / "model", tmp_path / "other"
    for made in (folder, folder / "sub", other):
        made.mkdir()
    save_file({"a": torch.zeros(2)}, other / "secret.safetensors")
    write_index(folder, name.format(other=other) if isinstance(name, str) else name)
    assert "must be a file in the folder" in refusal(tensor_names, folder)


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map(tmp_path: Path, content: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    assert "weight_map must be an object" in refusal(tensor_names, tmp_path)


@pytest.mark.parametrize("has_index", [False, True])
def test_links_of_the_hub_s_cache_stay_in_it(tmp_path: Path, has_index: bool) -> None:
    repository = tmp_path / "models--some--model"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    save_file({"a": torch.zeros(2)}, blobs / "0123")
    link = snapshot / "model.safetensors"
    link.symlink_to("../../blobs/0123")
    if has_index:
        write_index(snapshot, link.name)
    assert tensor_names(snapshot) == {"a"}
    other = tmp_path / "models--other--model" / "blobs"
    other.mkdir(parents=True)
    (blobs / "0123").rename(other / "4567")
    link.unlink()
    link.symlink_to(other / "4567")
    assert "outside the hub's cache" in refusal(tensor_names, snapshot)
    link.unlink()
    link.symlink_to("nowhere")
    assert "there is no file model.safetensors" in refusal(tensor_names, snapshot)


@pytest.mark.parametrize("name", ["model.safetensors", "sub/model.safetensors"])
@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_links_in_a_folder_that_the_user_named(
    tmp_path: Path, name: str, has_index: bool, steps: int
) -> None:
    store, folder = tmp_path / "store", tmp_path / "model"
    for made in (store, folder):
        made.mkdir()
    save_file({"a": torch.ones(2)}, store / "0123")
    target = store / "0123"
    if steps == 2:
        (tmp_path / "hop").symlink_to(target)
        target = tmp_path / "hop"
    if name.startswith("sub/"):
        # The folder itself is the link.
        target.rename(store / "model.safetensors")
        (folder / "sub").symlink_to(store)
    else:
        (folder / name).symlink_to(target)
    if has_index:
        write_index(folder, name)
    elif name.startswith("sub/"):
        return
    assert tensor_names(folder) == {"a"}
    ((_, tensor),) = iterate_weights(folder)
    assert torch.equal(tensor, torch.ones(2))


@pytest.mark.parametrize("kind", ["nowhere", "folder", "fifo", "other"])
def test_a_link_to_what_is_no_file_of_weights(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    target = tmp_path / kind
    if kind == "folder":
        target.mkdir()
    elif kind == "fifo":
        os.mkfifo(target)
    elif kind == "other":
        target.write_text("root:x:0:0")
    (folder / "model.safetensors").symlink_to(target)
    text = refusal(tensor_names, folder)
    assert "root:x" not in text
    assert ("not a valid" if kind == "other" else "there is no file") in text


def test_a_folder_that_is_a_link_is_fine(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert tensor_names(tmp_path / "link") == set(
        load_file(model / "model.safetensors")
    )


# -- the tokenizer's ---------------------------------------------------------------


def of_tokenizer(model: Path, edit: Callable[[dict[str, Any]], object]) -> str:
    raw = json.loads((model / "tokenizer.json").read_text())
    edit(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw.clear(),
        lambda raw: raw.update(model=3),
        lambda raw: raw["model"].update(vocab=[]),
        lambda raw: raw["model"].update(vocab={"a": -1}),
        lambda raw: raw["model"].update(vocab={"a": 2**31}),
        lambda raw: raw["model"].update(merges=[["a", "no such token"]]),
        lambda raw: raw.update(added_tokens=3),
        lambda raw: raw.update(decoder={"type": "Unknown"}),
        lambda raw: raw.update(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "("},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
    ],
)
def test_a_tokenizer_that_is_none(
    model: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    (tmp_path / "tokenizer.json").write_text(of_tokenizer(model, edit))
    assert "tokenizer" in refusal(lambda folder: load_tokenizer(str(folder)), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", b'{"add_bos_token": "yes"}', 'add_bos_token.*"yes"'),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template.*3"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "chat template"),
        ("tokenizer_config.json", b"\xff", "not UTF-8 text"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: not UTF-8 text"),
        (
            "chat_template.jinja",
            b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
            b"{% endfor %}",
            "chat template of .* takes more than",
        ),
    ],
)
def test_files_beside_the_tokenizer(
    model: Path, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    text = (model / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load_tokenizer(str(tmp_path))
    refusal(lambda folder: load_tokenizer(str(folder)), tmp_path)


def test_named_templates_without_names(model: Path, tmp_path: Path) -> None:
    text = (model / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text)
    config = {"chat_template": [{}, 3, {"name": "default", "template": "hi"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_tokenizer(str(tmp_path)).chat_template
    assert template is not None and template.source == "hi"


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    folder = refusal(lambda folder: load_tokenizer(str(folder)), tmp_path)
    assert "has no tokenizer.json; name a folder" in folder


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
