"""Prompts for training and measuring a head, as token ids.

    python -m lab.eagle3.prompts --model FOLDER --count 12000 --out PROMPTS

writes train.jsonl and heldout.jsonl for `lab.eagle3.train --prompts`, so that a machine
with a GPU need not read sources and need not have them. Only the tokenizer in FOLDER is
used.

Knows texts and tokenizers; refuses to know models, heads and losses.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from lab.eagle3.corpus import SourceText, package_of, read_texts
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer

TRAIN, HELDOUT = "train.jsonl", "heldout.jsonl"
PROMPT_TOKENS = (24, 160)
HELDOUT_PROMPTS = 64
# At most so many of a package, lest a large one be all there is.
HELDOUT_PER_PACKAGE = 20
# The kinds of held-out prompts, in turn.
HELDOUT_KINDS = ("code", "chat", "code", "docs")
# More texts than a run usually uses up.
TEXTS_PER_SEED = 2000


def encode_prompt(text: SourceText, tokenizer: Tokenizer, *, size: int) -> list[int]:
    """Return token ids: the whole request of a chat, or the first `size` of a text."""
    ids = tokenizer.encode(text.text)[:size]
    if text.kind != "chat" or tokenizer.chat_template is None:
        return ids
    messages = [{"role": "user", "content": tokenizer.decode(ids)}]
    chat = tokenizer.apply_chat_template(messages)
    return tokenizer.encode(chat, add_special_tokens=False)


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


def heldout_prompts(tokenizer: Tokenizer) -> Iterator[dict[str, object]]:
    """Yield prompts of held-out files, one per file."""
    taken: set[str] = set()
    of_package: Counter[str] = Counter()
    for text in read_texts(heldout=True):
        package = package_of(text.path)
        is_full = of_package[package] == HELDOUT_PER_PACKAGE
        kind = HELDOUT_KINDS[len(taken) % len(HELDOUT_KINDS)]
        if is_full or text.path in taken or text.kind != kind:
            continue
        taken.add(text.path)
        of_package[package] += 1
        ids = encode_prompt(text, tokenizer, size=PROMPT_TOKENS[1])
        yield {"path": text.path, "category": kind, "ids": ids}
        if len(taken) == HELDOUT_PROMPTS:
            return


def write_lines(path: Path, items: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")


def read_training(folder: Path, *, length: int) -> Iterator[list[int]]:
    """Yield the prompts of a folder once."""
    with (folder / TRAIN).open(encoding="utf-8") as lines:
        for ids in map(json.loads, lines):
            if len(ids) < length // 2:
                yield ids


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder with the target's tokenizer")
    add("--out", type=Path, required=True)
    add("--count", type=int, default=12_000, help="prompts to train with")
    add("--length", type=int, default=448, help="tokens of a request, its prompt too")
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.model)
    prompts = training_prompts(tokenizer, length=args.length, seed=args.seed)
    write_lines(args.out / TRAIN, islice(prompts, args.count))
    write_lines(args.out / HELDOUT, heldout_prompts(tokenizer))


if __name__ == "__main__":
    main()
