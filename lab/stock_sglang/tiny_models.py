"""Writes tiny Llamas with random weights, and drafts that sometimes agree with them.

The next token is mostly a fixed permutation of the last one, because the head is a
reordered embedding; the contributions of attention and MLP sometimes change it. The
drafts know only the permutation, so some of their tokens are accepted and some are not.

    python tiny_models.py FOLDER     # FOLDER/target, FOLDER/eagle, FOLDER/eagle3
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, VOCABULARY, LAYERS = 256, 512, 512, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
NOISE = 3.0
"""Scale of a layer's contribution: 28 % of the tokens differ from the permutation."""

_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def write_models(folder: Path) -> None:
    """Write a target and its drafts."""
    rng = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=rng)
    head = torch.empty_like(embedding)
    head[torch.randperm(VOCABULARY, generator=rng)] = embedding
    target = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    for number in range(LAYERS):
        target |= _layer(f"model.layers.{number}.", HIDDEN, NOISE, rng)
    _write(folder / "target", "LlamaForCausalLM", target)

    eagle = _layer("layers.0.", HIDDEN, NOISE / 10, rng)
    # Reads only the embedding, not the target's state.
    eagle["fc.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    eagle["fc.bias"] = torch.zeros(HIDDEN)
    _write(folder / "eagle", "LlamaForCausalLMEagle", eagle, num_hidden_layers=1)

    _write(
        folder / "eagle3",
        "LlamaForCausalLMEagle3",
        _eagle3(head, rng),
        num_hidden_layers=1,
        draft_vocab_size=VOCABULARY,
        # The default for four layers names one of them twice, which counts once.
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    )


def _eagle3(head: Tensor, rng: torch.Generator) -> dict[str, Tensor]:
    """Write a draft whose attention passes on each token's embedding.

    The residual is the target's state for the previous token, which hardly matters.
    Queries equal keys, so each token attends to equal tokens, and the output inverts
    the values.
    """
    weights = _layer("midlayer.", 2 * HIDDEN, NOISE / 10, rng)
    embedded = torch.cat((torch.ones(HIDDEN), torch.zeros(HIDDEN)))
    attention = "midlayer.self_attn."
    for name in ("k", "v"):
        # The input is twice as wide, but only half of it is read, so scale as for one
        # half.
        weights[f"{attention}{name}_proj.weight"] *= embedded * 2**0.5
    keys, values = (
        weights[f"{attention}{name}_proj.weight"]
        .view(KV_HEADS, HEAD_DIM, 2 * HIDDEN)
        .repeat_interleave(HEADS // KV_HEADS, dim=0)
        .flatten(0, 1)
        for name in ("k", "v")
    )
    weights[f"{attention}q_proj.weight"] = 1.5 * keys
    weights[f"{attention}o_proj.weight"] = 2 * values[:, :HIDDEN].T
    weights["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    last = 0.1 * torch.eye(HIDDEN)
    weights["fc.weight"] = torch.cat((torch.zeros(HIDDEN, 2 * HIDDEN), last), 1)
    weights["norm.weight"] = torch.ones(HIDDEN)
    weights["lm_head.weight"] = head
    return weights


def _layer(
    prefix: str, attention_in: int, noise: float, rng: torch.Generator
) -> dict[str, Tensor]:
    def weight(rows: int, columns: int, size: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=rng)
        return drawn * size / math.sqrt(columns)

    return {
        f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, attention_in),
        f"{prefix}self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, attention_in),
        f"{prefix}self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, attention_in),
        f"{prefix}self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM, noise),
        f"{prefix}mlp.gate_proj.weight": weight(INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": weight(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": weight(HIDDEN, INNER, noise),
    }


def _write(
    folder: Path, architecture: str, weights: dict[str, Tensor], **config: Any
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"architectures": [architecture], **_CONFIG, **config}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file(
        {name: value.bfloat16().contiguous() for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    write_models(parser.parse_args().folder)
