"""Clients of the promise run. Most requests stream, so the tokens that clients have
seen are known when an engine stops.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

from scripts.mutation.answers import Received
from scripts.mutation.asks import Asks
from scripts.mutation.worlds import World
from sglang.srt.managers.messages.io_struct import BatchOutput, RequestOutput
from sglang.test.harness import EngineHarness

ABORTS = 0.04


class Clients(ABC):
    """Seeded traffic: aborts, and new requests while others run.

    Args:
        aborts: probability of an abort before a step.

    Attributes:
        received: the outputs by the name of their request.
    """

    def __init__(
        self, harness: EngineHarness, world: World, *, seed: int, aborts: float
    ) -> None:
        self._harness = harness
        self._aborts = aborts
        self._rng = random.Random(seed)
        self._asks = Asks(world, seed=seed)
        self._num_sent = 0
        self._total = world.requests
        self._num_read = 0
        self.received: dict[str, Received] = {}

    @property
    def is_done(self) -> bool:
        return self._num_sent == self._total

    def before_step(self, *, is_idle: bool) -> None:
        rng = self._rng
        if not self.is_done and (is_idle or rng.random() < 0.4):
            for _ in range(min(self._total - self._num_sent, rng.randrange(1, 6))):
                self._submit(self._num_sent)
                self._num_sent += 1
        if self.received and rng.random() < self._aborts:
            self._abort(rng.choice(list(self.received)))

    def receive(self) -> None:
        """Process the messages since the last call."""
        responses = self._harness.io.responses
        new = responses[self._num_read :]
        self._num_read = len(responses)
        self._take([message for message in new if isinstance(message, BatchOutput)])

    def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Release what outlives the run."""

    @abstractmethod
    def _submit(self, number: int) -> None: ...

    @abstractmethod
    def _abort(self, name: str) -> None: ...

    @abstractmethod
    def _take(self, messages: list[BatchOutput]) -> None: ...


class WireClients(Clients):
    """Clients that read the scheduler's messages themselves."""

    def _submit(self, number: int) -> None:
        ask = self._asks[number]
        rid = self._harness.submit(
            ask.prompt,
            rid=f"q{number}",
            stream=ask.stream,
            extra_key=ask.extra_key,
            **ask.params,
        )
        self.received[rid] = Received(ask=ask)

    def _abort(self, name: str) -> None:
        self.received[name].is_aborted = True
        self._harness.abort(name)

    def _take(self, messages: list[BatchOutput]) -> None:
        for message in messages:
            for output in message.outputs:
                self._take_output(self.received[output.rid], output)

    def _take_output(self, received: Received, output: RequestOutput) -> None:
        received.messages_after_end += received.reason is not None
        if received.failure:
            return
        received.output += output.output_ids
        if len(received.output) != output.completion_tokens:
            # Like `RequestState.receive`.
            received.failure = f"tokens of {output.rid} are missing"
            return
        received.verified = (output.spec_verify_ct, output.spec_accept_tokens)
        if output.finish_reason is not None:
            received.reason = output.finish_reason.type
            received.matched = output.finish_reason.matched
