"""A small byte-level BPE tokenizer, trained here, and a backend on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend

# More ids than the tokenizer has: the rest is padding, as in many models.
VOCAB_SIZE = 421
EOS_IDS = [0, 2]
TEXT = """
def area(width, height): return {"name": "box", "size": [12, 34.5], "ok": true}
the quick brown fox jumps over the lazy dog, 0123456789 times: false, null.
{"id": 17, "tags": ["a", "bc"], "nested": {"x": -1.5e3, "y": ""}}
"""


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    result.train_from_iterator(TEXT.splitlines() * 3, trainer)
    return result


@pytest.fixture(scope="session")
def tokenizer_json(tokenizer: Tokenizer) -> str:
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def backend(tokenizer: Tokenizer) -> Iterator[LLGuidanceBackend]:
    result = LLGuidanceBackend(
        tokenizer.to_str(), vocab_size=VOCAB_SIZE, eos_ids=EOS_IDS
    )
    yield result
    result.close()
