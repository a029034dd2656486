"""Training windows from packed documents: a new order, new cuts and a new draw of chats
in every epoch.

Knows token ids and document ends; refuses to know text and models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lab.demo_model.paths import ENDOFTEXT_ID

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The documents of one split, and their size in UTF-8 bytes."""

    code: list[Tokens]
    chat: list[Tokens]
    code_bytes: int
    chat_bytes: int


def load_split(path: Path) -> Split:
    """Read an .npz file that pack.py wrote."""
    with np.load(path) as arrays:
        return Split(
            code=np.split(arrays["code_ids"], arrays["code_ends"][:-1]),
            chat=np.split(arrays["chat_ids"], arrays["chat_ends"][:-1]),
            code_bytes=int(arrays["code_bytes"]),
            chat_bytes=int(arrays["chat_bytes"]),
        )


def join(documents: list[Tokens]) -> Tokens:
    """Join documents to one stream [T] with a separator before and after each."""
    mark = np.asarray([ENDOFTEXT_ID], dtype=np.uint16)
    parts: list[Tokens] = [mark]
    for document in documents:
        parts += [document, mark]
    return np.concatenate(parts)


def cut_windows(stream: Tokens, *, length: int) -> Tokens:
    """Cut windows [N, length + 1]; a rest that does not fill a window is dropped.

    The last token of one is the first of the next, so that every token is predicted
    once.
    """
    count = (len(stream) - 1) // length
    starts = np.arange(count)[:, None] * length
    windows: Tokens = stream[starts + np.arange(length + 1)]
    return windows


def epoch_windows(split: Split, *, length: int, chat_share: float, seed: int) -> Tokens:
    """Return the windows [N, length + 1] of one epoch.

    Every file once, chats drawn without replacement until they are `chat_share` of the
    tokens, all shuffled and cut at a random offset.
    """
    rng = np.random.default_rng(seed)
    code_tokens = sum(map(len, split.code))
    budget = code_tokens * chat_share / (1.0 - chat_share)
    documents = list(split.code)
    for index in rng.permutation(len(split.chat)):
        if budget <= 0:
            break
        documents.append(split.chat[index])
        budget -= len(split.chat[index])
    order = rng.permutation(len(documents))
    stream = join([documents[i] for i in order])
    windows = cut_windows(stream[rng.integers(length) :], length=length)
    return windows[rng.permutation(len(windows))]


def batches(
    split: Split, *, length: int, batch: int, chat_share: float, seed: int
) -> Iterator[tuple[int, Tokens]]:
    """Yield (epoch, windows [batch, length + 1]) without end."""
    epoch = 0
    while True:
        windows = epoch_windows(
            split, length=length, chat_share=chat_share, seed=seed + epoch
        )
        for start in range(0, len(windows) - batch + 1, batch):
            yield epoch, windows[start : start + batch]
        epoch += 1
