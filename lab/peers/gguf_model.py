"""Conversion of a Llama checkpoint to GGUF without a tokenizer: token ids in and out.

Runs under the peer's Python: needs numpy and gguf, nothing of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

PRECISIONS: dict[str, gguf.GGMLQuantizationType] = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(folder: Path, target: Path, precision: str) -> None:
    """Write matrices in `precision`, vectors in float32.

    Raises:
        ValueError: not a Llama checkpoint with the plain rotary embedding.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"] or config.get("rope_scaling"):
        raise ValueError(f"{folder}: only plain Llama models are converted")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")
    of_heads = {"q_proj": heads, "k_proj": kv_heads}
    for name, tensor in read_tensors(folder):
        part = name.rsplit(".", 2)[-2]
        if part in of_heads:
            tensor = interleave(tensor, of_heads[part])
        kind = PRECISIONS["f32" if tensor.ndim == 1 else precision]
        data = gguf.quants.quantize(np.ascontiguousarray(tensor), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Map a name: `model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    if name in OTHER_TENSORS:
        return OTHER_TENSORS[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{LAYER_TENSORS[module]}.{kind}"


def interleave(weight: Floats, heads: int) -> Floats:
    """Reorder rows of q or k: halves `[x0.., y0..]` to pairs `[x0, y0, ..]`."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def read_tensors(folder: Path) -> Iterator[tuple[str, Floats]]:
    """Yield name and float32 value of every tensor in the safetensors files."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        body = memoryview(data)[8 + size :]
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            raw = _READERS[entry["dtype"]](body[start:stop])
            yield name, raw.reshape(entry["shape"])


def _read_bf16(raw: memoryview) -> Floats:
    """Convert bfloat16, which is the upper half of a float32."""
    bits = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16
    return bits.view(np.float32)


_READERS = {
    "F32": lambda raw: np.frombuffer(raw, dtype="<f4"),
    "F16": lambda raw: np.frombuffer(raw, dtype="<f2").astype(np.float32),
    "BF16": _read_bf16,
}
