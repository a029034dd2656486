"""Encoding of corpus and chats to one .npz of token ids per split, for a machine that
has neither the corpus nor the time to tokenize it.

Knows the tokenizer and the chat template; refuses to know how training uses them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment
from tokenizers import Tokenizer

from lab.demo_model.paths import ASSETS, CORPUS, PACK
from lab.demo_model.train_tokenizer import CHAT_TEMPLATE

ENCODE_BATCH = 64
TEMPLATE = Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)


def render_chat(sample: dict[str, str]) -> str:
    """Render a conversation as the chat template does, ending in `<|im_end|>\\n`."""
    messages = [
        {"role": "user", "content": sample["user"]},
        {"role": "assistant", "content": sample["assistant"]},
    ]
    if sample["system"]:
        messages.insert(0, {"role": "system", "content": sample["system"]})
    return TEMPLATE.render(messages=messages, add_generation_prompt=False)


def read_texts(corpus: Path, split: str, *, is_chat: bool) -> Iterator[str]:
    """Yield the documents of one split in file order."""
    name = f"chat_{split}.jsonl" if is_chat else f"{split}.jsonl"
    with (corpus / name).open(encoding="utf-8") as reader:
        for line in reader:
            item = json.loads(line)
            yield render_chat(item) if is_chat else item["text"]


def encode_documents(
    tokenizer: Tokenizer, texts: list[str]
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """Return all ids joined, uint16 [T], and the end of each document, int64 [N]."""
    ids: list[npt.NDArray[np.uint16]] = []
    for start in range(0, len(texts), ENCODE_BATCH):
        for encoding in tokenizer.encode_batch(texts[start : start + ENCODE_BATCH]):
            ids.append(np.asarray(encoding.ids, dtype=np.uint16))
    ends = np.cumsum([len(item) for item in ids], dtype=np.int64)
    return np.concatenate(ids), ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--assets", type=Path, default=ASSETS)
    parser.add_argument("--out", type=Path, default=PACK)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.assets / "tokenizer.json"))
    for split in ("train", "heldout"):
        arrays: dict[str, npt.NDArray[Any]] = {}
        for kind in ("code", "chat"):
            texts = list(read_texts(args.corpus, split, is_chat=kind == "chat"))
            ids, ends = encode_documents(tokenizer, texts)
            arrays[f"{kind}_ids"], arrays[f"{kind}_ends"] = ids, ends
            size = sum(len(text.encode()) for text in texts)
            arrays[f"{kind}_bytes"] = np.asarray(size)
            print(f"{split} {kind}: {len(texts)} documents, {len(ids)} tokens")
        np.savez(args.out / f"{split}.npz", allow_pickle=False, **arrays)
    for name in ("heldout.jsonl", "chat_heldout.jsonl", "summary.json"):
        shutil.copy(args.corpus / name, args.out / name)


if __name__ == "__main__":
    main()
