"""`python -m sglang.test.fuzz`: attacks servers with requests made from their schema.

See docs/fuzzing.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang.test.fuzz.attack import Attack, Outcome
from sglang.test.fuzz.shooter import parse_shot
from sglang.test.server_process import ServerProcess

# A small context keeps runs short that have no limit of their own.
SMALL = ("--context-length", "512", "--max-total-tokens", "8192")
CONFIGS: dict[str, tuple[str, ...]] = {
    "plain": SMALL,
    "eagle3": (*SMALL, "--speculative-algorithm", "EAGLE3"),
    "page16": (*SMALL, "--page-size", "16"),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    outcomes = []
    for config in args.configs:
        outcome = attack(
            config,
            requests=args.requests // len(args.configs),
            clients=args.clients,
            number=args.seed,
            replay=args.replay,
        )
        outcomes.append(outcome)
        _save(args.save, outcome, number=args.seed)
        print(_table(outcome), flush=True)
    report = {
        "seed": args.seed,
        "passed": all(outcome.has_passed for outcome in outcomes),
        "configs": [outcome.as_dict() for outcome in outcomes],
    }
    print(json.dumps(report))
    return 0 if report["passed"] else 1


def attack(
    config: str,
    *,
    requests: int,
    clients: int,
    number: int,
    replay: Path | None = None,
) -> Outcome:
    """Start the server of `config`, attack it and stop it."""
    server = ServerProcess(CONFIGS[config])
    try:
        server.wait_ready()
        one = Attack(
            server, name=config, requests=requests, clients=clients, number=number
        )
        if replay is None:
            return asyncio.run(one.run())
        lines = replay.read_text(encoding="utf-8").splitlines()
        shots = [parse_shot(entry) for entry in map(json.loads, lines)]
        return asyncio.run(one.replay(shots))
    finally:
        server.stop()


def _save(path: Path | None, outcome: Outcome, *, number: int) -> None:
    if path is None or not outcome.failures:
        return
    with path.open("a", encoding="utf-8") as file:
        for failure in outcome.failures:
            entry = {"config": outcome.name, "seed": number, **failure.as_dict()}
            file.write(json.dumps(entry) + "\n")


def _table(outcome: Outcome) -> str:
    lines = [
        f"{outcome.name}: {'passed' if outcome.has_passed else 'FAILED'}",
        f"  requests         {outcome.requests} in {outcome.seconds:.1f} s",
        f"  bystander        {outcome.bystander_rounds} answers, "
        f"{outcome.bystander_busy} refused as busy",
        f"  longest stall    {outcome.longest_stall * 1000:.0f} ms of /health",
        f"  slots at idle    {outcome.slots_at_idle}",
    ]
    for when, memory in (
        ("before", outcome.memory_before),
        ("after", outcome.memory_after),
    ):
        if memory is not None:
            front, scheduler = memory
            lines.append(
                f"  memory {when:<9} front {front:.0f}, scheduler {scheduler:.0f} MiB"
            )
    for status, count in sorted(outcome.statuses.items()):
        lines.append(f"  {status:<16} {count}")
    lines += [f"  ! {complaint}" for complaint in outcome.complaints]
    for failure in outcome.failures[:10]:
        shown = failure.shot.body[:200].decode("utf-8", "replace")
        lines.append(
            f"  ! {failure.reason}: {failure.shot.method} {failure.shot.path} "
            f"({failure.shot.manner.value}) {shown!r} -> {failure.answer[:300]!r}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang.test.fuzz")
    parser.add_argument(
        "--configs", nargs="+", choices=sorted(CONFIGS), default=list(CONFIGS)
    )
    parser.add_argument(
        "--requests", type=int, default=3000, help="split over the configurations"
    )
    parser.add_argument("--clients", type=int, default=8, help="connections at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="append failed requests to this file")
    parser.add_argument(
        "--replay", type=Path, help="send the requests of such a file instead"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
