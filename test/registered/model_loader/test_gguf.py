"""GGUF files: the same model as the folder's, and errors that name what is wrong."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.weight_utils import iterate_weights, tensor_names
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.gguf_header import read_gguf_header
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.gguf_files import NAMES, finish, write_gguf
from sglang.test.tiny_models import EOS_ID, write_tiny_model

register_cpu_ci(est_time=3, suite="cpu")

LLAMA = "LlamaForCausalLM"
PROMPT = [7, 30, 200, 11, 42, 5, 5, 90]
# Rotary factors of Llama 3.1 with 8 pairs of channels and a base of 500,000.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def logits(path, **args):
    harness = ForwardHarness(path, **args)
    row = harness.new_row(PROMPT)
    return harness.extend([(row, len(PROMPT))])[0]


@pytest.fixture(scope="module", params=[*NAMES])
def folder(request, tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture
def llama(tmp_path):
    return write_tiny_model(tmp_path / "llama", LLAMA)


def test_a_file_gives_the_folders_logits(folder, tmp_path):
    file = write_gguf(folder, tmp_path / "m.gguf")
    assert torch.equal(logits(file), logits(folder))


@pytest.mark.parametrize("precision", ["BF16", "F16", "Q8_0", "Q4_1", "Q5_0"])
def test_blocks_are_dequantised(tmp_path, precision):
    """Rows are quantised one by one, so that their order does not matter."""
    folder = write_tiny_model(
        tmp_path / "m", LLAMA, hidden_size=256, intermediate_size=256, head_dim=64
    )
    file = write_gguf(folder, tmp_path / "m.gguf", precision=precision)
    kind = gguf.GGMLQuantizationType[precision]
    given = dict(iterate_weights(file))
    for name, tensor in load_file(folder / "model.safetensors").items():
        expected = tensor.numpy()
        if expected.ndim > 1:
            expected = gguf.quants.dequantize(
                gguf.quants.quantize(expected, kind), kind
            )
            assert np.abs(expected - tensor.numpy()).max() > 0
        assert np.array_equal(given.pop(name).numpy(), expected), name
    assert not given


def test_config_and_names_are_the_folders(folder, tmp_path):
    file = write_gguf(folder, tmp_path / "m.gguf")
    ours, theirs = ModelConfig.from_path(file), ModelConfig.from_path(folder)
    for name in (
        *("architecture", "hidden_size", "intermediate_size", "num_layers"),
        *("num_heads", "num_kv_heads", "head_dim", "vocab_size", "context_len"),
        *("ropes", "tie_word_embeddings", "sliding_window", "eos_token_ids"),
        *("layer_types", "attention_scale", "hidden_act"),
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert tensor_names(file) == tensor_names(folder)


def test_sizes_that_follow_from_others_may_be_absent(llama, tmp_path):
    """Older files have neither the width of a head nor the size of the vocabulary."""
    file = write_gguf(
        llama, tmp_path / "m.gguf", attention__key_length=None, rope__freq_base=None
    )
    config = ModelConfig.from_path(file)
    assert config.num_kv_heads < config.num_heads
    assert torch.equal(logits(file), logits(llama))


def test_sizes_that_tensors_contradict_are_named(llama, tmp_path):
    for key, words in (
        ("block_count", "llama.block_count must be 2, as many as have tensors"),
        ("embedding_length", "token_embd.weight, which has 64"),
        ("feed_forward_length", "blk.0.ffn_up.weight, which has"),
        ("vocab_size", "token_embd.weight, which has"),
        ("attention.head_count", "blk.0.attn_q.weight, which has"),
        ("attention.head_count_kv", "blk.0.attn_k.weight, which has"),
    ):
        changed = {key.replace(".", "__"): 4096}
        file = write_gguf(llama, tmp_path / "m.gguf", **changed)
        with pytest.raises(ValueError, match=rf"m\.gguf: llama\.{key} .*") as caught:
            ModelConfig.from_path(file)
        assert words in str(caught.value)


def test_tied_embeddings_need_no_head(tmp_path):
    folder = write_tiny_model(tmp_path / "tied", LLAMA, tie_word_embeddings=True)
    file = write_gguf(folder, tmp_path / "m.gguf")
    assert torch.equal(logits(file), logits(folder))


def test_the_tokenizer_is_in_the_file(llama, tmp_path):
    tokenizer = load_tokenizer(str(write_gguf(llama, tmp_path / "m.gguf")))
    text = "the café 🎉"
    ids = tokenizer.encode(text)
    assert ids[:2] == [257, ord("e")]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == EOS_ID
    assert EOS_ID in tokenizer.special_ids
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<hi>"


def add_factors(file, factors):
    """Write `file` again with a tensor of rotary factors."""
    reader = gguf.GGUFReader(file)
    target = file.with_name("factors.gguf")
    writer = gguf.GGUFWriter(str(target), "llama")
    for key, value in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = value.types[0]
            sub = value.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    finish(writer)
    return target


def test_rotary_factors_of_llama_3_are_recognised(tmp_path):
    """The expected factors are those of the published model's GGUF files."""
    folder = write_tiny_model(
        tmp_path / "m", LLAMA, rope_parameters=LLAMA3_ROPE, max_position_embeddings=9000
    )
    file = write_gguf(folder, tmp_path / "m.gguf", rope__freq_base=500000.0)
    turns = [8192 / (2 * np.pi * 500000.0 ** (i / 8)) for i in range(8)]
    smooth = [min(max((turn - 1) / 3, 0), 1) for turn in turns]
    factors = [1 / ((1 - s) / 8 + s) for s in smooth]
    assert factors[0] == 1 and factors[-1] == 8
    assert 1 < sorted(factors, key=lambda f: abs(f - 3))[0] < 8
    scaled = add_factors(file, factors)
    assert ModelConfig.from_path(scaled).rope == ModelConfig.from_path(folder).rope
    assert torch.equal(logits(scaled), logits(folder))
    factors[3] *= 1.5
    with pytest.raises(ValueError, match=r"rope_freqs\.weight.*Llama 3"):
        ModelConfig.from_path(add_factors(file, factors))


@pytest.mark.parametrize("place", ["file", "folder"])
def test_load_format_gguf_takes_a_file_or_a_folder_with_one(llama, tmp_path, place):
    file = write_gguf(llama, llama / "m.gguf")
    chosen = file if place == "file" else llama
    args = ServerArgs(model_path=str(chosen), load_format="gguf")
    assert args.model_path == str(file) == args.tokenizer_path


@pytest.mark.parametrize(
    ("names", "chosen", "load_format", "words"),
    [
        (("a.gguf", "b.gguf"), ".", "gguf", ["2 GGUF files", "a.gguf, b.gguf"]),
        ((), ".", "gguf", ["neither a .gguf file nor"]),
        ((), "c.gguf", "gguf", ["c.gguf", "neither a .gguf file nor"]),
        (("a.gguf",), "a.gguf", "safetensors", ["a.gguf", "--load-format gguf"]),
    ],
)
def test_paths_that_do_not_fit_the_format(tmp_path, names, chosen, load_format, words):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ValueError) as caught:
        ServerArgs(model_path=str(tmp_path / chosen), load_format=load_format)
    for word in words:
        assert word in str(caught.value)


NAME = struct.pack("<Q", 5)  # length of the architecture's name


def edited(file, old: bytes, new: bytes):
    data = file.read_bytes()
    assert old in data and len(old) == len(new)
    file.write_bytes(data.replace(old, new, 1))
    return file


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (NAME + b"llama", NAME + b"mamba", ["general.architecture", "mamba", "llama"]),
        (b"GGUF\x03", b"GGUF\x09", ["GGUF version 9"]),
        (b"GGUF\x03", b"GGIF\x03", ["not a GGUF file"]),
        (b"blk.1.ffn_up", b"blk.1.ffn_ap", ["blk.1.ffn_ap", LLAMA]),
        (b"blk.1.ffn_up", b"blk.x.ffn_up", ["blk.x.ffn_up", LLAMA]),
        (b"blk.1.ffn_up", b"blk.9.ffn_up", ["model.layers.9.mlp.up_proj", LLAMA]),
        (b"blk.1.ffn_up", b"blk.0.ffn_up", ["blk.0.ffn_up", "twice"]),
    ],
)
def test_foreign_content_is_named(llama, tmp_path, old, new, words):
    file = write_gguf(llama, tmp_path / "m.gguf")
    if not new:
        old, new = (
            b"\x05\x00\x00\x00\x00\x00\x00\x00llama",
            b"\x05" + bytes(7) + b"mamba",
        )
        words = ["general.architecture", "mamba", "llama, qwen2"]
    edited(file, old, new)
    with pytest.raises(ValueError) as caught:
        ForwardHarness(file)
    for word in [*words, "m.gguf"]:
        assert word in str(caught.value)


def test_a_missing_value_and_a_part_of_a_model_are_named(llama, tmp_path):
    file = write_gguf(llama, tmp_path / "m.gguf")
    edited(file, b"llama.block_count", b"llama.block_kount")
    with pytest.raises(ValueError, match=r"m\.gguf: llama\.block_count is missing"):
        ModelConfig.from_path(file)
    part = write_gguf(llama, tmp_path / "p.gguf", extra={"split.count": 3})
    with pytest.raises(ValueError, match=r"p\.gguf: one of 3 parts of a model"):
        ModelConfig.from_path(part)


def test_an_unknown_block_format_is_named(llama, tmp_path):
    file = write_gguf(llama, tmp_path / "m.gguf")
    header = read_gguf_header(file)
    name = "output_norm.weight"
    place = file.read_bytes().index(name.encode()) + len(name)
    data = bytearray(file.read_bytes())
    kind_at = place + 4 + 8 * len(header.tensors[name].shape)
    for kind, word in ((39999, "unknown format"), (24, "I8, which is not supported")):
        data[kind_at : kind_at + 4] = struct.pack("<I", kind)
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f'm.gguf: tensor "{name}".*{word}'):
            list(iterate_weights(file))


def test_every_cut_is_an_error_that_names_the_file(llama, tmp_path):
    whole = write_gguf(llama, tmp_path / "m.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    for size in [*range(0, 600, 7), *range(600, len(whole), 4999), len(whole) - 40]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            list(iterate_weights(file))


def test_counts_beyond_the_file_cost_nothing(tmp_path):
    """An array of 2**60 texts, and as many values and tensors."""
    file = tmp_path / "m.gguf"
    many = 1 << 60
    begin = b"GGUF" + struct.pack("<IQQ", 3, many, many)
    key = struct.pack("<Q", 1) + b"k"
    for tail in (
        b"",
        key + struct.pack("<IIQ", 9, 8, many),
        key + struct.pack("<IIQ", 9, 4, many),
        key + struct.pack("<IIQ", 9, 9, 1),
        struct.pack("<Q", many),
    ):
        file.write_bytes(begin + tail)
        with pytest.raises(ValueError, match=r"m\.gguf"):
            read_gguf_header(file)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
