"""GGUF files of tiny checkpoints, written with the library's name map and writer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from sglang.test.tiny_models import BYTE_VOCAB, EOS, byte_alphabet

# Model class -> name of the architecture in the library.
NAMES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
# Further values by architecture, for its tiny model.
VALUES: dict[str, dict[str, float | str]] = {
    "gemma3": {
        "attention.sliding_window": 12,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base": 5e4,
        "rope.freq_base_swa": 1e3,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
}


def write_gguf(
    folder: Path,
    target: Path,
    *,
    precision: str = "F32",
    extra: Mapping[str, int] | None = None,
    **values: Any,
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file with a byte tokenizer.

    Matrices get `precision`, vectors float32. `values` replace numbers in the header by
    their names without the architecture, with dots as "__" (None leaves one out);
    `extra` are additional integers.
    """
    config = json.loads((folder / "config.json").read_text())
    name = NAMES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(target), name)
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    numbers: dict[str, Any] = {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "context_length": config["max_position_embeddings"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "vocab_size": config["vocab_size"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": 10000.0,
    }
    numbers |= VALUES.get(name, {})
    numbers |= {key.replace("__", "."): value for key, value in values.items()}
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, number in numbers.items():
        if number is not None:
            add[type(number)](f"{name}.{key}", number)
    for key, number in (extra or {}).items():
        writer.add_uint32(key, number)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(
        {arch: kind for kind, arch in gguf.MODEL_ARCH_NAMES.items()}[name],
        config["num_hidden_layers"],
    )
    kind = gguf.GGMLQuantizationType[precision]
    for own_name, tensor in load_file(folder / "model.safetensors").items():
        own, part = own_name.rsplit(".", 1)
        data = tensor.float().numpy()
        if name == "llama" and own.endswith(("q_proj", "k_proj")):
            data = _pairs(data, heads if own.endswith("q_proj") else kv_heads)
        if name == "gemma3" and own.endswith("norm"):
            data = data + np.float32(1)
        its_kind = gguf.GGMLQuantizationType.F32 if data.ndim == 1 else kind
        writer.add_tensor(
            f"{names.get_name(own)}.{part}",
            gguf.quants.quantize(np.ascontiguousarray(data), its_kind),
            raw_dtype=its_kind,
        )
    finish(writer)
    return target


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    alphabet = byte_alphabet()
    # Converters require a merge.
    tokens = [*(alphabet[byte] for byte in range(BYTE_VOCAB)), EOS, "th"]
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds[BYTE_VOCAB] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(BYTE_VOCAB)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")


def _pairs(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder a head's rows: halves `[x0.., y0..]` to pairs `[x0, y0, ..]`."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    pairs: np.ndarray[Any, Any] = halves.swapaxes(1, 2).reshape(weight.shape)
    return pairs


def write_vocabulary(
    target: Path,
    tokens: Sequence[str],
    *,
    architecture: str = "llama",
    model: str = "gpt2",
    kinds: Mapping[str, gguf.TokenType] | None = None,
    scores: Sequence[float] | None = None,
    merges: Sequence[str] | None = None,
    **values: Any,
) -> Path:
    """Write a GGUF file that contains only a tokenizer.

    `kinds` are the types of tokens that are not normal; `values` are further keys below
    `tokenizer.ggml.` with integers, booleans and strings.
    """
    writer = gguf.GGUFWriter(str(target), architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    normal = gguf.TokenType.NORMAL
    writer.add_token_types([(kinds or {}).get(token, normal) for token in tokens])
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    add = {int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string}
    for key, value in values.items():
        add[type(value)](f"tokenizer.ggml.{key}", value)
    finish(writer)
    return target
