"""Traffic of the promise run. Every request streams, so the tokens that clients have
seen are known when an engine stops; the mock oracle says which of them are right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.mutation.worlds import CONTEXT, VOCAB
from sglang.srt.managers.messages.io_struct import BatchOutput
from sglang.test.harness import EngineHarness
from sglang.test.mock_oracle import next_tokens

LONGEST_OUTPUT = 70


@dataclass(kw_only=True)
class Asked:
    """A submitted request, and what its client has received."""

    prompt: list[int]
    max_new_tokens: int
    is_aborted: bool = False
    output: list[int] = field(default_factory=list)
    reason: str | None = None
    length: int | None = None
    messages_after_end: int = 0
    verified: tuple[int, int] = (0, 0)


class Clients:
    """Seeded traffic: shared prefixes, aborts, new requests while others run."""

    def __init__(self, harness: EngineHarness, *, seed: int, total: int) -> None:
        self._harness = harness
        self._rng = random.Random(seed)
        self._left = total
        self._read = 0
        slots = harness.scheduler.cache.allocator.size
        self._longest = min(CONTEXT, slots // 2) - 1
        self._stems = [self._tokens(self._rng.randrange(20, 110)) for _ in range(4)]
        self.asked: dict[str, Asked] = {}

    def _tokens(self, length: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(length)]

    @property
    def is_done(self) -> bool:
        return not self._left

    def before_step(self, *, is_idle: bool) -> None:
        rng = self._rng
        if self._left and (is_idle or rng.random() < 0.4):
            for _ in range(min(self._left, rng.randrange(1, 6))):
                self._submit()
        if self.asked and rng.random() < 0.04:
            rid = rng.choice(list(self.asked))
            self.asked[rid].is_aborted = True
            self._harness.abort(rid)

    def _submit(self) -> None:
        rng = self._rng
        stem = rng.choice(self._stems)
        prompt = stem[: rng.randrange(len(stem) + 1)]
        prompt = (prompt + self._tokens(rng.randrange(1, 60)))[: self._longest]
        room = self._longest + 1 - len(prompt)
        new = min(rng.choice((1, 2, rng.randrange(1, LONGEST_OUTPUT))), room)
        if rng.random() < 0.4:
            new = min(LONGEST_OUTPUT, room)
        rid = self._harness.submit(
            prompt,
            rid=f"q{len(self.asked)}",
            stream=True,
            max_new_tokens=new,
            ignore_eos=True,
            extra_key=rng.choice((None, None, None, "tenant")),
        )
        self.asked[rid] = Asked(prompt=prompt, max_new_tokens=new)
        self._left -= 1

    def receive(self) -> None:
        """Process the messages since the last call."""
        responses = self._harness.io.responses
        for message in responses[self._read :]:
            for output in getattr(message, "outputs", ()):
                assert isinstance(message, BatchOutput)
                asked = self.asked[output.rid]
                asked.messages_after_end += asked.reason is not None
                asked.output += output.output_ids
                if len(asked.output) != output.completion_tokens:
                    # Like `RequestState.receive`.
                    raise RuntimeError(f"tokens of {output.rid} are missing")
                asked.verified = (output.spec_verify_ct, output.spec_accept_tokens)
                if output.finish_reason is not None:
                    asked.reason = output.finish_reason.type
                    asked.length = output.finish_reason.length
        self._read = len(responses)


def wrong_tokens(asked: Asked) -> int:
    """Count tokens received by a client that do not follow from the preceding ones."""
    if not asked.output:
        return 0
    predicted = next_tokens(asked.prompt + asked.output, vocab_size=VOCAB)
    right: Sequence[int] = predicted[len(asked.prompt) - 1 : -1]
    return sum(a != b for a, b in zip(asked.output, right, strict=True))


def has_wrong_end(asked: Asked) -> bool:
    if asked.messages_after_end or asked.reason is None:
        return True
    if asked.reason == "abort":
        return not asked.is_aborted
    count = len(asked.output)
    return not count == asked.max_new_tokens == asked.length
