"""Text that the target writes itself, for training its drafts and for measuring them:
windows in which a piece of a document is followed by the target's continuation.

Knows the target and the packed documents; refuses to know drafts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo_model.completions import choose_cases
from scripts.demo_model.data import Split, Tokens, load_split
from scripts.demo_model.model import DemoConfig, DemoModel, Layer, rotate
from scripts.demo_model.paths import (
    ASSETS,
    BUILD,
    ENDOFTEXT_ID,
    IM_START_ID,
    PACK,
)
from scripts.demo_model.target_states import load_target

Plan = npt.NDArray[np.int64]

PREFIX_TOKENS = (24, 400)
OWN_TOKENS = (64, 360)
CHAT_SHARE = 0.2
SAMPLED_ROWS = 3  # one row in so many is sampled, the others are greedy
TEMPERATURE = 0.8
HELDOUT_CASES = 200
SEED = 7


def draw_prefix(
    split: Split, rng: np.random.Generator, chat_marker: int
) -> list[int] | Tokens:
    """A chat up to its answer, or a piece of a file; half of those from its start."""
    if rng.random() < CHAT_SHARE:
        chat = split.chat[rng.integers(len(split.chat))]
        mark = int(np.flatnonzero(chat == IM_START_ID)[-1])
        return chat[: mark + chat_marker]
    code = split.code[rng.integers(len(split.code))]
    size = int(rng.integers(*PREFIX_TOKENS))
    start = 0
    if rng.random() < 0.5 and len(code) > size:
        start = int(rng.integers(len(code) - size))
    return code[start : start + size]


def plan_training(
    split: Split, *, rows: int, length: int, chat_marker: int, seed: int
) -> Plan:
    """int64 [rows, length]: token ids, and -1 where the target writes. `chat_marker`
    tokens introduce the answer of a chat."""
    rng = np.random.default_rng(seed)
    plan = np.full((rows, length), -1, dtype=np.int64)
    for row in plan:
        at = 0
        while at < length:
            row[at] = ENDOFTEXT_ID
            prefix = draw_prefix(split, rng, chat_marker)[: length - at - 1]
            row[at + 1 : at + 1 + len(prefix)] = prefix
            at += 1 + len(prefix) + int(rng.integers(*OWN_TOKENS))
    return plan


def plan_heldout(
    pack: Path, tokenizer: Tokenizer, *, cases: int, length: int, new_tokens: int
) -> tuple[Plan, npt.NDArray[np.int64]]:
    """Plan [cases, length] with one prompt each, and the prompts' lengths. A prompt
    keeps its last tokens where it is too long."""
    with (pack / "heldout.jsonl").open(encoding="utf-8") as reader:
        files = [(item["path"], item["text"]) for item in map(json.loads, reader)]
    chosen = choose_cases(files, count=cases, seed=0)
    plan = np.full((len(chosen), length), -1, dtype=np.int64)
    lens = np.zeros(len(chosen), dtype=np.int64)
    for i, case in enumerate(chosen):
        ids = tokenizer.encode(case.prompt).ids[-(length - new_tokens) :]
        plan[i, : len(ids)] = ids
        lens[i] = len(ids)
        plan[i, len(ids) + new_tokens :] = ENDOFTEXT_ID
    return plan, lens


class Writer:
    """Decodes all rows in lockstep: planned tokens are fed, the others are chosen."""

    def __init__(self, target: DemoModel, *, rows: int, length: int) -> None:
        self.target = target
        config: DemoConfig = target.config
        weight = target.model.embed_tokens.weight
        shape = (rows, config.num_key_value_heads, length, config.head_dim)
        self.cache = [
            (weight.new_empty(shape), weight.new_empty(shape))
            for _ in range(config.num_hidden_layers)
        ]

    def logits(self, tokens: Tensor, position: int) -> Tensor:
        """tokens int64 [R] at `position` -> logits [R, V]."""
        model = self.target.model
        rows = tokens.shape[0]
        cos = self.target.cos[position : position + 1]
        sin = self.target.sin[position : position + 1]
        x = model.embed_tokens(tokens)
        for layer, (keys, values) in zip(model.layers, self.cache, strict=True):
            assert isinstance(layer, Layer)
            attention = layer.self_attn
            shape = (rows, -1, 1, attention.head_dim)
            y = layer.input_layernorm(x)
            q = rotate(attention.q_proj(y).view(shape), cos, sin)
            keys[:, :, position] = rotate(attention.k_proj(y).view(shape), cos, sin)[
                :, :, 0
            ]
            values[:, :, position] = attention.v_proj(y).view(shape)[:, :, 0]
            # The queries of a group read the same keys: they are rows of one head.
            q = q.view(rows, keys.shape[1], -1, attention.head_dim)
            end = position + 1
            out = F.scaled_dot_product_attention(
                q, keys[:, :, :end], values[:, :, :end]
            )
            x = x + attention.o_proj(out.reshape(rows, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(model.norm(x), model.embed_tokens.weight)

    @torch.no_grad()
    def write(self, plan: Tensor, is_sampled: Tensor) -> Tensor:
        """plan int64 [R, L] with -1 where to write, is_sampled bool [R] -> ids."""
        ids = plan.clone()
        length = plan.shape[1]
        for position in range(length - 1):
            logits = self.logits(ids[:, position], position)
            wanted = plan[:, position + 1]
            noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log()
            noise *= is_sampled[:, None] * TEMPERATURE
            chosen = (logits.float() - noise).argmax(-1)
            ids[:, position + 1] = torch.where(wanted >= 0, wanted, chosen)
        return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--assets", type=Path, default=ASSETS)
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--out", type=Path, default=BUILD / "draft_text")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=3072)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--cases", type=int, default=HELDOUT_CASES)
    parser.add_argument("--new-tokens", type=int, default=256)
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(SEED)
    target = load_target(args.assets, device, dtype)
    tokenizer = Tokenizer.from_file(str(args.assets / "tokenizer.json"))
    marker = len(tokenizer.encode("<|im_start|>assistant\n").ids)
    split = load_split(args.pack / "train.npz")
    train = plan_training(
        split, rows=args.rows, length=args.length, chat_marker=marker, seed=SEED
    )
    heldout, prompt_lens = plan_heldout(
        args.pack,
        tokenizer,
        cases=args.cases,
        length=args.length,
        new_tokens=args.new_tokens,
    )
    plan = torch.from_numpy(np.concatenate((train, heldout))).to(device)
    is_sampled = torch.arange(len(plan), device=device) % SAMPLED_ROWS == 0
    is_sampled[len(train) :] = False
    ids = Writer(target, rows=len(plan), length=args.length).write(plan, is_sampled)
    found = ids.cpu().numpy().astype(np.uint16)
    args.out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        args.out / "train.npz",
        ids=found[: len(train)],
        own_share=np.asarray(float((train < 0).mean())),
    )
    np.savez_compressed(
        args.out / "heldout.npz",
        ids=found[len(train) :],
        prompt_lens=prompt_lens,
        new_tokens=np.asarray(args.new_tokens),
    )
    print(
        f"{len(train)} rows, {100 * (train < 0).mean():.1f} % of the tokens written by "
        f"the target, in {time.monotonic() - began:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
