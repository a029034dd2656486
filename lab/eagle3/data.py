"""Prompts as token ids, and batches of the documents that a target wrote.

Knows tokenizers and padding; refuses to know models, heads and losses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lab.eagle3.corpus import SourceText, read_texts
from lab.eagle3.record import Document
from sglang.srt.utils.hf_tokenizer import Tokenizer

PROMPT_TOKENS = (24, 160)
HELDOUT_PROMPTS = 64
# More texts than a run usually uses up.
TEXTS_PER_SEED = 2000
# Documents whose lengths are sorted together, so that little of a batch is padding.
POOL_BATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Documents padded to one length: the fields of `Document` with a batch dimension.
    `best` is -1 after the end of a document.
    """

    ids: Tensor
    aux: Tensor
    hidden: Tensor
    best: Tensor


def encode_prompt(text: SourceText, tokenizer: Tokenizer, *, size: int) -> list[int]:
    """Return token ids: the whole request of a chat, or the first `size` of a text."""
    if text.kind == "chat" and tokenizer.chat_template is not None:
        ids = tokenizer.encode(text.text)[:size]
        messages = [{"role": "user", "content": tokenizer.decode(ids)}]
        chat = tokenizer.apply_chat_template(messages)
        return tokenizer.encode(chat, add_special_tokens=False)
    return tokenizer.encode(text.text)[:size]


def training_prompts(
    tokenizer: Tokenizer, *, length: int, seed: int
) -> Iterator[list[int]]:
    """Yield prompts endlessly; a repeated text is cut differently.

    Each `seed` begins elsewhere.
    """
    rng = np.random.default_rng(seed)
    start = seed * TEXTS_PER_SEED
    while True:
        for text in islice(read_texts(heldout=False), start, None):
            ids = encode_prompt(text, tokenizer, size=int(rng.integers(*PROMPT_TOKENS)))
            if len(ids) < length // 2:
                yield ids
        start = 0


def write_heldout(tokenizer: Tokenizer, path: Path) -> None:
    """Write prompts of held-out files, one JSON object per line, one per file."""
    taken: dict[str, dict[str, object]] = {}
    for text in read_texts(heldout=True):
        kind = "chat" if len(taken) % 2 else "text"
        if text.path not in taken and text.kind == kind:
            ids = encode_prompt(text, tokenizer, size=PROMPT_TOKENS[1])
            taken[text.path] = {"path": text.path, "kind": text.kind, "ids": ids}
        if len(taken) == HELDOUT_PROMPTS:
            break
    lines = [json.dumps(item) + "\n" for item in taken.values()]
    path.write_text("".join(lines), encoding="utf-8")


def batches(
    documents: list[Document], *, size: int, unroll: int, seed: int
) -> Iterator[Batch]:
    """Yield batches of `size` documents without end, in a new order in each epoch."""
    usable = [d for d in documents if len(d.ids) > unroll + 1]
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(usable))
        for start in range(0, len(order), size * POOL_BATCHES):
            pool = sorted(
                order[start : start + size * POOL_BATCHES],
                key=lambda i: len(usable[i].ids),
            )
            groups = [pool[at : at + size] for at in range(0, len(pool), size)]
            for index in rng.permutation(len(groups)):
                yield pad([usable[i] for i in groups[index]])


def pad(documents: list[Document]) -> Batch:
    def padded(name: str, value: float = 0.0) -> Tensor:
        parts = [getattr(document, name) for document in documents]
        return pad_sequence(parts, batch_first=True, padding_value=value)

    return Batch(
        ids=padded("ids"),
        aux=padded("aux"),
        hidden=padded("hidden"),
        best=padded("best", -1),
    )
