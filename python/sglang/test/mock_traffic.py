"""Random traffic for the mock model, and the check of the answers by its oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.test.harness import Finished
from sglang.test.mock_oracle import NO_WINDOWS, Windows, next_tokens


@dataclass
class Expected:
    """A submitted request."""

    prompt: list[int]
    max_new_tokens: int
    is_aborted: bool = False


# Sizes for a long soak, which keep many requests in a small pool so that a step serves
# more of them.
SHORT_STEM, SHORT_PROMPT, SHORT_OUTPUT = 24, 16, 16
LONG_ONE_IN = 32


class Serves(Protocol):
    """What requests are sent to."""

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that answers."""

    def submit(self, input_ids: Sequence[int], **options: Any) -> str:
        """Queue a request; return its rid."""

    def abort(self, rid: str) -> None:
        """End a request."""


class Traffic:
    """Submits random requests while the scheduler runs, and aborts some of them.

    Args:
        longest_output: maximum output tokens.
        short_after: number of requests after which all but one in `LONG_ONE_IN` are
            short, or None for no short ones.
    """

    def __init__(
        self,
        harness: Serves,
        rng: random.Random,
        total: int,
        *,
        longest_output: int = 160,
        short_after: int | None = None,
    ) -> None:
        self._short_after = short_after
        self._longest_output = longest_output
        self.harness, self.rng = harness, rng
        self.left = total
        self.expected: dict[str, Expected] = {}
        slots = harness.scheduler.cache.allocator.size
        config = harness.scheduler.model_config
        self.vocab_size = config.vocab_size
        self.longest = min(config.context_len, slots) - 1
        self.stems = [self._tokens(rng.randrange(20, 200)) for _ in range(4)]

    def _tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(length)]

    def on_step(self, step: int) -> None:
        rng = self.rng
        if self.left and rng.random() < 0.3:
            for _ in range(min(self.left, rng.randrange(1, 9))):
                self.submit()
        elif self.left and not self.harness.scheduler.has_work():
            self.submit()
        if self.expected and rng.random() < 0.05:
            rid = rng.choice(list(self.expected))
            self.expected[rid].is_aborted = True
            self.harness.abort(rid)

    def submit(self) -> None:
        rng = self.rng
        stem = rng.choice(self.stems)
        own, longest_output = 90, self._longest_output
        if self._is_short():
            stem, own, longest_output = stem[:SHORT_STEM], SHORT_PROMPT, SHORT_OUTPUT
        prompt = stem[: rng.randrange(len(stem) + 1)] + self._tokens(
            rng.randrange(1, own)
        )
        prompt = prompt[: self.longest]
        room = self.longest + 1 - len(prompt)
        medium = 40 if longest_output > 40 else longest_output // 2
        sizes = (1, 2, rng.randrange(1, medium), rng.randrange(medium, longest_output))
        new = min(rng.choice(sizes), room)
        rid = self.harness.submit(
            prompt,
            rid=f"request {len(self.expected)}",
            stream=rng.random() < 0.5,
            max_new_tokens=new,
            ignore_eos=True,
            extra_key=rng.choice((None, None, None, "tenant")),
        )
        self.expected[rid] = Expected(prompt, new)
        self.left -= 1

    def _is_short(self) -> bool:
        if self._short_after is None or len(self.expected) < self._short_after:
            return False
        return self.rng.randrange(LONG_ONE_IN) > 0


def check(
    expected: dict[str, Expected],
    answers: dict[str, Finished],
    *,
    vocab_size: int,
    windows: Windows = NO_WINDOWS,
) -> None:
    """Check that all outputs equal the oracle's; only aborted requests may be short."""
    assert set(answers) == set(expected)
    for rid, want in expected.items():
        answer = answers[rid]
        predicted = next_tokens(
            want.prompt + answer.output_ids, vocab_size=vocab_size, windows=windows
        )
        assert answer.output_ids == predicted[len(want.prompt) - 1 : -1], rid
        reason = answer.finish_reason
        assert reason is not None
        if reason.type == "abort":
            assert want.is_aborted, reason
        else:
            assert reason.type == "length"
            assert len(answer.output_ids) == want.max_new_tokens == reason.length
