"""Engines of the mock model with and without speculation, and a shortage of slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang.test.harness import EngineHarness
from sglang.test.mock_oracle import next_tokens
from sglang.test.tiny_models import write_mock_draft, write_mock_model

VOCAB, CONTEXT = 1000, 512
# With speculation or without, in order or overlapped.
KINDS = ("plain", "overlap", "spec", "spec-overlap")


def write_models(root: Path) -> Path:
    """Write the target and its draft."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    write_mock_model(root / "target", **sizes)
    write_mock_draft(root / "draft", kind="EAGLE", source="attention", **sizes)
    return root


def engine(models: Path, kind: str, **options: Any) -> EngineHarness:
    if kind.startswith("spec"):
        options |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(models / "draft"),
            "speculative_eagle_topk": 1,
            "speculative_num_steps": 3,
            "speculative_num_draft_tokens": 4,
        }
    return EngineHarness(
        models / "target",
        overlap=kind.endswith("overlap"),
        skip_tokenizer_init=True,
        **options,
    )


def watched_engine(models: Path, kind: str, **options: Any) -> EngineHarness:
    """An engine that stops at anything wrong in its KV cache."""
    has_radix = not options.get("disable_radix_cache", False)
    return engine(
        models,
        kind,
        kv_canary="raise",
        kv_canary_real_data="all",
        kv_canary_sweep_interval=1 if has_radix else 0,
        **options,
    )


def prompt_of(length: int, *, start: int = 0) -> list[int]:
    return [(start + 7 * i) % VOCAB for i in range(length)]


def pages(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_size)


def oracle(prompt: Sequence[int], count: int) -> list[int]:
    """The answer of `count` tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_tokens(tokens, vocab_size=VOCAB)[-1])
    return tokens[len(prompt) :]


def check_answer(prompt: Sequence[int], output: Sequence[int], count: int) -> None:
    """Check that `output` has `count` tokens, and each is right after those before."""
    assert len(output) == count
    tokens = [*prompt, *output]
    predicted = next_tokens(tokens, vocab_size=VOCAB)
    assert list(output) == predicted[len(prompt) - 1 : -1]


class Shortage:
    """Takes slots away from an engine, as other requests would, and gives them back."""

    def __init__(self, harness: EngineHarness) -> None:
        self._cache = harness.scheduler.cache
        self._taken = torch.empty(0, dtype=torch.int64)

    def leave(self, num_slots: int) -> None:
        """Leave so many free slots, and no cached ones but those in use."""
        self.end()
        self._cache.evict(self._cache.evictable_size())
        excess = self._cache.allocator.available_size() - num_slots
        taken = self._cache.allocator.alloc(excess)
        assert taken is not None
        self._taken = taken

    def end(self) -> None:
        self._cache.allocator.free(self._taken)
        self._taken = self._taken[:0]
