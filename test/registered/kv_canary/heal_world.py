"""Engines in mode `heal` with plain requests, and what their answers must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.test.harness import EngineHarness, Finished
from sglang.test.mock_oracle import next_tokens
from sglang.test.spec_canary_traffic import VOCAB


def healing(model: Path, **options: Any) -> EngineHarness:
    defaults: dict[str, Any] = {
        "page_size": 4,
        "max_total_tokens": 2048,
        "max_running_requests": 24,
        "skip_tokenizer_init": True,
        "overlap": True,
        "kv_canary": "heal",
    }
    return EngineHarness(model, **without_limit(defaults | options))


def without_limit(options: dict[str, Any]) -> dict[str, Any]:
    """Let an engine that heals do so as often as it must."""
    if options["kv_canary"] == "heal":
        return {"kv_canary_heal_limit": 0, **options}
    return options


def prompt_of(i: int, length: int = 40) -> list[int]:
    return [(37 * i + 11 * j) % VOCAB for j in range(length)]


def submit(harness: EngineHarness, i: int, **options: Any) -> str:
    defaults: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    return harness.submit(prompt_of(i), rid=f"q{i}", **(defaults | options))


def is_exact(prompt: list[int], answer: Finished) -> bool:
    predicted = next_tokens(prompt + answer.output_ids, vocab_size=VOCAB)
    return answer.output_ids == predicted[len(prompt) - 1 : -1]


def check(answers: dict[str, Finished], *, of: int, length: int = 24) -> None:
    assert len(answers) == of
    for i in range(of):
        answer = answers[f"q{i}"]
        assert len(answer.output_ids) == length, answer.finish_reason
        assert is_exact(prompt_of(i), answer)


def heals(harness: EngineHarness) -> int:
    counts = harness.scheduler.stats_snapshot().kv_canary_heals_total
    return sum(counts.values())


def healer_of(harness: EngineHarness) -> Any:
    return harness.scheduler._healer
