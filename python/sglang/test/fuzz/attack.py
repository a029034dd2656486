"""An attack on one server from its first request to the verdict."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.test.bystander import memory_mib
from sglang.test.fuzz.cases import Cases, Shot
from sglang.test.fuzz.shooter import Failure, Shooter
from sglang.test.fuzz.watch import (
    Bystander,
    HealthProber,
    slots_at_idle,
)
from sglang.test.fuzz.wire import Connection
from sglang.test.server_process import ServerProcess

MAX_STALL_SECONDS = 1.0
MAX_GROWTH_MIB = 16
# Minimum number of bystander questions; a short attack on a fast machine continues
# until then.
MIN_BYSTANDER_ROUNDS = 5
# Memory is judged after the first part has warmed up all caches.
WARM_UP_SHARE = 0.2
MIN_WARM_UP = 5000
SETTLE_SECONDS = 2.0
SETTLE_SAMPLES = 20

TRACEBACK_LINES = 40
MAX_TRACEBACKS = 3


@dataclass(kw_only=True)
class Outcome:
    """Findings of an attack. Memory is (front, scheduler) in MiB; `before` is taken
    after the warm-up, or None if the attack was too short for one.
    """

    name: str
    requests: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    bystander_rounds: int = 0
    bystander_busy: int = 0
    longest_stall: float = 0.0
    memory_before: tuple[float, float] | None = None
    memory_after: tuple[float, float] = (0.0, 0.0)
    slots_at_idle: int = -1

    @property
    def has_passed(self) -> bool:
        return not self.failures and not self.complaints

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with the number of failures instead of the
        failures.
        """
        reasons = Counter(failure.reason for failure in self.failures)
        return {**vars(self), "statuses": dict(self.statuses), "failures": reasons}


class Attack:
    """Sends `requests` requests to `server` from several clients at once."""

    def __init__(
        self,
        server: ServerProcess,
        *,
        name: str,
        requests: int,
        clients: int,
        number: int,
    ) -> None:
        self._server = server
        self._requests = requests
        self._clients = clients
        self._number = number
        self._shooters: list[Shooter] = []
        self._bystander = Bystander(server.url)
        self.outcome = Outcome(name=name)

    async def run(self) -> Outcome:
        """Attack, watch and judge."""
        url, outcome = self._server.url, self.outcome
        schema = (await Connection(url).ask("GET", "/openapi.json")).json()
        bystander, prober = self._bystander, HealthProber(url, self._in_flight)
        await bystander.begin()
        watching = [
            asyncio.create_task(bystander.run()),
            asyncio.create_task(prober.run()),
        ]
        cases = Cases(schema, number=self._number)
        began = time.monotonic()
        try:
            warm_up = max(int(self._requests * WARM_UP_SHARE), MIN_WARM_UP)
            if warm_up < self._requests:
                await self._shoot(cases, warm_up)
                outcome.memory_before = await self._memory()
            await self._shoot(cases, self._requests)
            while self._bystander.asked <= MIN_BYSTANDER_ROUNDS and not self._is_dead():
                await self._shoot(cases, outcome.requests + self._clients)
        finally:
            outcome.seconds = time.monotonic() - began
            for task in watching:
                task.cancel()
        outcome.bystander_rounds, outcome.bystander_busy = (
            bystander.rounds,
            bystander.busy,
        )
        outcome.longest_stall = prober.longest
        await self._judge(bystander, prober)
        return outcome

    async def replay(self, shots: list[Shot]) -> Outcome:
        """Send `shots` one after another."""
        shooter = self._new_shooter()
        await shooter.run(shots)
        shooter.close()
        self.outcome.requests = len(shots)
        return self.outcome

    def _new_shooter(self) -> Shooter:
        shooter = Shooter(
            self._server.url,
            statuses=self.outcome.statuses,
            failures=self.outcome.failures,
        )
        self._shooters.append(shooter)
        return shooter

    def _in_flight(self) -> list[Shot]:
        return [one.shot for one in self._shooters if one.shot is not None]

    async def _shoot(self, cases: Cases, until: int) -> None:
        """Send cases until the given number of requests has been sent."""

        async def work() -> None:
            shooter = self._new_shooter()
            while self.outcome.requests < until and not self._is_dead():
                case = cases.next()
                self.outcome.requests += len(case)
                await shooter.run(case)
            shooter.close()

        await asyncio.gather(*(work() for _ in range(self._clients)))

    def _is_dead(self) -> bool:
        return self._server.process.poll() is not None

    async def _memory(self) -> tuple[float, float]:
        """Return the minimum memory of front and scheduler while idle with an empty
        cache: bodies of clients that have left may still be read for a moment. Pages of
        files do not count, which the kernel drops and reads as it likes.
        """
        self.outcome.slots_at_idle = await slots_at_idle(self._server.url)
        pids = (self._server.process.pid, self._server.scheduler_pid())
        front, scheduler = (memory_mib(pid, "RssAnon") for pid in pids)
        for _ in range(SETTLE_SAMPLES):
            await asyncio.sleep(SETTLE_SECONDS / SETTLE_SAMPLES)
            front = min(front, memory_mib(pids[0], "RssAnon"))
            scheduler = min(scheduler, memory_mib(pids[1], "RssAnon"))
        return front, scheduler

    async def _judge(self, bystander: Bystander, prober: HealthProber) -> None:
        outcome, complain = self.outcome, self.outcome.complaints.append
        if self._is_dead():
            complain(f"the server died with code {self._server.process.poll()}")
            return
        try:
            outcome.memory_after = await self._memory()
            await bystander.check()
        except (TimeoutError, OSError) as error:
            complain(f"never idle: {error!r}")
        if outcome.slots_at_idle:
            complain(f"{outcome.slots_at_idle} KV slots in use at idle")
        if bystander.wrong:
            complain(f"{len(bystander.wrong)} bystander answers: {bystander.wrong[0]}")
        if prober.bad:
            complain(f"/health failed {prober.bad} time(s)")
        if prober.longest > MAX_STALL_SECONDS:
            complain(f"/health stood still for {prober.longest:.2f} s")
            outcome.failures += [
                Failure(reason="in flight at the longest stall", shot=shot)
                for shot in prober.suspects
            ]
        for traceback in tracebacks(self._server.lines):
            complain(f"in the log:\n{traceback}")
        self._judge_memory()

    def _judge_memory(self) -> None:
        before, after = self.outcome.memory_before, self.outcome.memory_after
        if before is None:
            return
        for name, old, new in zip(("front", "scheduler"), before, after, strict=True):
            if new > old + MAX_GROWTH_MIB:
                self.outcome.complaints.append(
                    f"the {name} grew from {old:.0f} to {new:.0f} MiB"
                )


def tracebacks(lines: Sequence[str]) -> list[str]:
    """The first tracebacks of a log, each with the line before it."""
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
    return [
        "\n".join(lines[max(i - 1, 0) : i + TRACEBACK_LINES])
        for i in starts[:MAX_TRACEBACKS]
    ]
