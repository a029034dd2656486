"""Bystanders of an attack: an honest client, a health prober, memory, slots."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from sglang.test.fuzz.cases import Shot
from sglang.test.fuzz.wire import Closed, Connection

PROBE_SECONDS = 0.02
TICK_SECONDS = 0.005
HONEST = {
    "text": "def area(width, height):",
    "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
}
IDLE_SECONDS = 60.0


class Bystander:
    """Repeatedly asks for the same greedy answer, which must never change.

    Attributes:
        asked: questions so far, answered or not.
        rounds: answers so far.
        busy: how often the server was full.
        wrong: anything that came instead of the answer.
    """

    def __init__(self, url: str) -> None:
        self._connection = Connection(url)
        self._body = json.dumps(HONEST).encode()
        self._expected: list[int] = []
        self.asked = 0
        self.rounds = 0
        self.busy = 0
        self.wrong: list[str] = []

    async def begin(self) -> None:
        """Get the answer from an otherwise idle server."""
        answer = await self._connection.ask("POST", "/generate", self._body)
        self._expected = answer.json()["output_ids"]

    async def run(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(PROBE_SECONDS)

    async def check(self) -> None:
        self.asked += 1
        try:
            answer = await self._connection.ask("POST", "/generate", self._body)
        except (Closed, OSError) as error:
            self.wrong.append(f"no answer: {error!r}")
            await asyncio.sleep(1)
            return
        self.rounds += 1
        if answer.status == 503:
            self.busy += 1
        elif answer.status != 200 or answer.json()["output_ids"] != self._expected:
            self.wrong.append(f"{answer.status}: {answer.body[:300]!r}")


class OwnDelays:
    """Notes how long this process was kept from running: by its own work, or because
    the machine is busy. A wait explained by this is not the server's fault."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._last = time.monotonic()

    def restart(self) -> None:
        self._longest = 0.0

    def longest(self) -> float:
        """The longest delay since the restart, in seconds."""
        return max(self._longest, time.monotonic() - self._last - TICK_SECONDS)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._longest = self.longest()
            self._last = time.monotonic()


class HealthProber:
    """Asks `/health` on one connection and notes the longest wait.

    Args:
        in_flight: the requests of the attack that are being sent or answered.

    Attributes:
        longest: seconds, without the delays of this process.
        suspects: the requests that were in flight then.
        bad: answers that were not 200.
    """

    def __init__(self, url: str, in_flight: Callable[[], list[Shot]]) -> None:
        self._connection = Connection(url)
        self._in_flight = in_flight
        self._delays = OwnDelays()
        self.longest = 0.0
        self.suspects: list[Shot] = []
        self.bad = 0
        self.rounds = 0

    async def run(self) -> None:
        ticking = asyncio.create_task(self._delays.run())
        try:
            while True:
                await self._probe()
                await asyncio.sleep(PROBE_SECONDS)
        finally:
            ticking.cancel()

    async def _probe(self) -> None:
        before = self._in_flight()
        self._delays.restart()
        began = time.monotonic()
        try:
            answer = await self._connection.ask("GET", "/health")
            self.bad += answer.status != 200
        except (Closed, OSError):
            self.bad += 1
            await asyncio.sleep(1)
        waited = time.monotonic() - began - self._delays.longest()
        if waited > self.longest:
            self.longest = waited
            now = [shot for shot in self._in_flight() if shot not in before]
            self.suspects = before + now
        self.rounds += 1


async def slots_at_idle(url: str) -> int:
    """Return the KV slots in use once nothing runs and the cache is flushed.

    Raises:
        TimeoutError: requests are still in flight after a minute.
    """
    connection = Connection(url)
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        info: dict[str, Any] = (await connection.ask("GET", "/server_info")).json()
        stats = info["internal_states"][0]
        running = stats["num_running_reqs"] + stats["num_queue_reqs"]
        if not info["num_in_flight"] and not running:
            flushed = await connection.ask("POST", "/flush_cache")
            if flushed.status == 200:
                break
        if time.monotonic() > deadline:
            raise TimeoutError(f"{info['num_in_flight']} request(s) never end")
        await asyncio.sleep(0.05)
    info = (await connection.ask("GET", "/server_info")).json()
    connection.close()
    used: int = info["internal_states"][0]["num_used_tokens"]
    return used
