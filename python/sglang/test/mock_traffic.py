"""Random traffic for the mock model, and the check of the answers by its oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang.srt.models.mock_oracle import NO_WINDOWS, Windows, next_tokens
from sglang.test.harness import EngineHarness, Finished


@dataclass
class Expected:
    """A submitted request."""

    prompt: list[int]
    max_new_tokens: int
    is_aborted: bool = False


class Traffic:
    """Submits random requests while the scheduler runs, and aborts some of them."""

    def __init__(
        self,
        harness: EngineHarness,
        rng: random.Random,
        total: int,
        *,
        longest_output: int = 160,
    ) -> None:
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
        prompt = stem[: rng.randrange(len(stem) + 1)] + self._tokens(
            rng.randrange(1, 90)
        )
        prompt = prompt[: self.longest]
        room = self.longest + 1 - len(prompt)
        new = min(
            rng.choice(
                (1, 2, rng.randrange(1, 40), rng.randrange(40, self._longest_output))
            ),
            room,
        )
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
