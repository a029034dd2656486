"""Honest streams next to hostile clients, and next to as many ordinary ones.

python benchmark/e2e/bench_hostile.py [--minutes 10] [--clients 11]
Phases in turn: honest streams alone, with ordinary clients, with hostile ones. Honest
answers are greedy and must not change. Prints a table; the last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
from hostile_clients import HOSTILE, Visit, Visitor, plain_request

from sglang.bench_utils.launch import run_report
from sglang.bench_utils.local_server import LocalServer
from sglang.bench_utils.memory import family_mib
from sglang.bench_utils.report import Json, format_table, provenance

HONEST_STREAMS = 4
HONEST_TOKENS = 64
WARM_UP_SECONDS = 5.0
COLUMNS = ("Honest streams", "tok/s", "gap p99 (ms)", "/health worst (ms)")


@dataclass(slots=True)
class Seen:
    """Observations of honest clients and the prober in all turns of one phase."""

    tokens: int = 0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    visits: Counter[str] = field(default_factory=Counter)

    def figures(self) -> Json:
        gaps = sorted(self.gaps)
        return {
            "tok_s": self.tokens / self.seconds,
            "gap_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
            "gap_median_ms": 1e3 * statistics.median(gaps),
            "health_worst_ms": 1e3 * max(self.health),
            "failures": dict(self.failures),
            "visits": dict(self.visits),
        }


class Honest:
    """Greedy streams, one after another, compared with the first answer."""

    def __init__(self, url: str, index: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120.0)
        self._prompt = f"The {index}th stream counts to a hundred: "
        self._expected: list[int] | None = None

    async def ask(self, seen: Seen) -> None:
        body = {
            "text": self._prompt,
            "stream": True,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": HONEST_TOKENS,
                "ignore_eos": True,
            },
        }
        last, ids = time.perf_counter(), list[int]()
        async with self._http.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                seen.failures[f"honest {response.status_code}"] += 1
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                new = json.loads(line[6:])["output_ids"]
                seen.tokens += len(new) - len(ids)
                seen.gaps.append(now - last)
                ids, last = new, now
        if self._expected is None:
            self._expected = ids
        if ids != self._expected:
            seen.failures["honest answer changed"] += 1


async def repeat(
    until: float, seen: Seen, visits: Sequence[Visit], visitor: Visitor
) -> None:
    """Visit in turn until the phase ends."""
    for visit in itertools.cycle(visits):
        if time.perf_counter() > until:
            return
        seen.visits[visit.__name__] += 1
        try:
            await visit(visitor)
        except (httpx.HTTPError, OSError) as error:
            seen.failures[f"{visit.__name__}: {type(error).__name__}"] += 1
            await asyncio.sleep(0.05)


async def probe(until: float, seen: Seen, url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as http:
        while time.perf_counter() < until:
            began = time.perf_counter()
            response = await http.get("/health")
            seen.health.append(time.perf_counter() - began)
            if response.status_code != 200:
                seen.failures[f"/health {response.status_code}"] += 1
            await asyncio.sleep(0.01)


async def turn(
    url: str,
    honest: Sequence[Honest],
    seen: Seen,
    others: Callable[[], list[Visit]],
    *,
    clients: int,
    seconds: float,
    seed: int,
) -> None:
    """One turn of a phase: all clients for `seconds`."""
    began = time.perf_counter()
    until = began + seconds

    async def ask_on(stream: Honest) -> None:
        while time.perf_counter() < until:
            await stream.ask(seen)

    visits = others()
    guests = []
    for i in range(clients if visits else 0):
        # Each client begins with a different kind.
        kinds = visits[i % len(visits) :] + visits[: i % len(visits)]
        guests.append(repeat(until, seen, kinds, Visitor(url, seed + i)))
    tasks = [asyncio.create_task(guest) for guest in guests]
    await asyncio.gather(probe(until, seen, url), *map(ask_on, honest))
    seen.seconds += time.perf_counter() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


PHASES: dict[str, Callable[[], list[Visit]]] = {
    "alone": list,
    "ordinary": lambda: [plain_request],
    "hostile": lambda: list(HOSTILE.values()),
}


async def measure(url: str, *, minutes: float, clients: int, turns: int) -> Json:
    honest = [Honest(url, i) for i in range(HONEST_STREAMS)]
    await turn(url, honest, Seen(), list, clients=0, seconds=WARM_UP_SECONDS, seed=0)
    seen = {name: Seen() for name in PHASES}
    seconds = minutes * 60 / (turns * len(PHASES))
    for at, (name, others) in itertools.product(range(turns), PHASES.items()):
        await turn(
            url,
            honest,
            seen[name],
            others,
            clients=clients,
            seconds=seconds,
            seed=1000 * at,
        )
    return {name: phase.figures() for name, phase in seen.items()}


def run(args: argparse.Namespace) -> Json:
    """Start a server and measure it."""
    with LocalServer(args.flags) as server:
        before = family_mib(server.pid)
        phases = asyncio.run(
            measure(
                server.url, minutes=args.minutes, clients=args.clients, turns=args.turns
            )
        )
        after = family_mib(server.pid)
    return {
        "benchmark": "bench_hostile",
        "minutes": args.minutes,
        "clients": args.clients,
        "flags": args.flags,
        **phases,
        "share_beside_hostile": phases["hostile"]["tok_s"]
        / phases["ordinary"]["tok_s"],
        "memory_mib": [before, after],
        **provenance(),
    }


def print_table(report: Json) -> None:
    rows = [
        (
            name,
            report[name]["tok_s"],
            report[name]["gap_p99_ms"],
            report[name]["health_worst_ms"],
        )
        for name in PHASES
    ]
    print(format_table(COLUMNS, rows))
    print(
        f"speed beside hostile clients over ordinary: "
        f"{report['share_beside_hostile']:.2f}"
    )
    print(
        f"memory (MiB): {report['memory_mib'][0]:.0f} -> {report['memory_mib'][1]:.0f}"
    )
    for name in PHASES:
        print(f"{name}: visits {report[name]['visits']}")
        print(f"{name}: failures {report[name]['failures']}")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags in `argv`, which defaults to this process's arguments; unknown
    ones are passed to the server.
    """
    parser = argparse.ArgumentParser(
        prog="bench_hostile.py", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="all phases")
    parser.add_argument("--clients", type=int, default=len(HOSTILE))
    parser.add_argument("--turns", type=int, default=3, help="of each phase")
    parser.add_argument("--output-file", help="the report's line is appended")
    args, args.flags = parser.parse_known_args(argv)
    return args


if __name__ == "__main__":
    sys.exit(run_report(parse_args, run, print_table))
