"""Models and drafts of the promise run, written on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sglang.test.tiny_models import (
    MOCK_STATE,
    write_mock_draft,
    write_mock_model,
    write_tiny_eagle,
    write_tiny_model,
)

CONTEXT = 512
VOCAB = 1000
# The bytes, and a token that ends the text.
BYTES = 257
TINY = 264
LAYERS = ["full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A target.

    Fields:
        write: writes it into a new folder.
        has_text: whether every token of the vocabulary has a text.
        is_mock: whether an oracle knows its drafts.
    """

    vocab: int
    write: Callable[[Path], object]
    has_text: bool = False
    is_mock: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft of `model`; `write` gets its new folder and the folder of the target."""

    algorithm: str
    model: str
    write: Callable[[Path, Path], object]

    def bind(self, target: Path) -> Callable[[Path], object]:
        return lambda folder: self.write(folder, target)


def _mock(vocab: int = VOCAB, **fields: Any) -> Callable[[Path], object]:
    return partial(
        write_mock_model, vocab_size=vocab, max_position_embeddings=CONTEXT, **fields
    )


def _mock_draft(
    kind: str, source: str, *, model: str = "mock", vocab: int = VOCAB
) -> Draft:
    def write(folder: Path, target: Path) -> object:
        return write_mock_draft(
            folder,
            kind=kind,
            source=source,
            vocab_size=vocab,
            max_position_embeddings=CONTEXT,
        )

    return Draft(algorithm=kind, model=model, write=write)


MODELS = {
    "mock": Model(vocab=VOCAB, write=_mock()),
    "bytes": Model(vocab=BYTES, write=_mock(BYTES), has_text=True),
    "windows": Model(vocab=VOCAB, write=_mock(sliding_window=24, layer_types=LAYERS)),
    "states": Model(vocab=VOCAB, write=_mock(**MOCK_STATE)),
    "latents": Model(
        vocab=TINY,
        write=partial(
            write_tiny_model,
            architecture="DeepseekV2ForCausalLM",
            max_position_embeddings=CONTEXT,
        ),
        is_mock=False,
    ),
}
DRAFTS = {
    "eagle-hidden": _mock_draft("EAGLE", "hidden"),
    "eagle-attention": _mock_draft("EAGLE", "attention"),
    "eagle3-attention": _mock_draft("EAGLE3", "attention"),
    "eagle-windows": _mock_draft("EAGLE", "hidden", model="windows"),
    "eagle-states": _mock_draft("EAGLE", "hidden", model="states"),
    "eagle-bytes": _mock_draft("EAGLE", "hidden", model="bytes", vocab=BYTES),
    "eagle-latents": Draft(
        algorithm="EAGLE",
        model="latents",
        write=partial(write_tiny_eagle, algorithm="EAGLE"),
    ),
}
