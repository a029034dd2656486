"""Workloads for comparisons of engines: fixed lengths, fresh text.

All rounds have the same lengths, from a separate seed. Their texts differ, so that no
prefix cache helps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from sglang.bench_utils.datasets import draw_length, text_ids
from sglang.srt.utils.hf_tokenizer import Tokenizer

# Factor of all lengths in a quick run, which checks that a benchmark works; its figures
# are meaningless.
QUICK_SCALE = 0.05
LENGTH_SEED = 20
CONCURRENT = 16
# Flags of the head that comes with the demo model, as `make serve` starts it.
DEMO_DRAFTS: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Interval of prompt lengths and of output lengths, in tokens."""

    prompt: tuple[int, int]
    output: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and the number of tokens to generate for each.

    All are sent at once, or one by one (`is_sequential`).
    """

    prompts: list[list[int]]
    output_lens: list[int]
    is_sequential: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.output_lens)


# Batch 1, mixed lengths, and equal lengths, which need no padding.
SEQUENTIAL = PromptLengths(prompt=(32, 64), output=(128, 128))
MIXED = PromptLengths(prompt=(32, 256), output=(32, 128))
EQUAL = PromptLengths(prompt=(64, 64), output=(64, 64))
SHARED_PROMPT = 900
OWN_PROMPT = 100
SHARED_OUTPUT = 32


class Workloads:
    """Draws the workloads of one run.

    Args:
        seed: seed of the text.
        is_quick: all lengths times `QUICK_SCALE`.
    """

    def __init__(self, tokenizer: Tokenizer, *, seed: int, is_quick: bool) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._scale = QUICK_SCALE if is_quick else 1.0

    def sequential(self, round_: int, *, count: int = 3) -> Workload:
        return self._draw("b1", round_, SEQUENTIAL, count=count, is_sequential=True)

    def mixed(self, round_: int) -> Workload:
        return self._draw("b16", round_, MIXED, count=CONCURRENT)

    def equal(self, round_: int) -> Workload:
        return self._draw("b16_equal", round_, EQUAL, count=CONCURRENT)

    def shared_prefix(self, round_: int) -> Workload:
        rng = random.Random(f"shared {self._seed} {round_}")
        prefix = text_ids(self._tokenizer, rng, self._scaled(SHARED_PROMPT))
        own = self._scaled(OWN_PROMPT)
        prompts = [
            prefix + text_ids(self._tokenizer, rng, own) for _ in range(CONCURRENT)
        ]
        outputs = [self._scaled(SHARED_OUTPUT)] * CONCURRENT
        return Workload(prompts=prompts, output_lens=outputs)

    def prompt(self, label: str, length: int) -> list[int]:
        """Return a prompt that is unique to `label`."""
        rng = random.Random(f"prompt {self._seed} {label}")
        return text_ids(self._tokenizer, rng, self._scaled(length))

    def _draw(
        self,
        name: str,
        round_: int,
        lengths: PromptLengths,
        *,
        count: int,
        is_sequential: bool = False,
    ) -> Workload:
        length_rng = random.Random(f"{name} {LENGTH_SEED}")
        text_rng = random.Random(f"{name} {self._seed} {round_}")
        prompts, outputs = [], []
        for _ in range(count):
            prompt_len = self._scaled(_between(length_rng, lengths.prompt))
            prompts.append(text_ids(self._tokenizer, text_rng, prompt_len))
            outputs.append(self._scaled(_between(length_rng, lengths.output)))
        return Workload(
            prompts=prompts, output_lens=outputs, is_sequential=is_sequential
        )

    def _scaled(self, length: int) -> int:
        return max(int(length * self._scale), 1)


def _between(rng: random.Random, interval: tuple[int, int]) -> int:
    low, high = interval
    return draw_length(rng, high, low / high)
