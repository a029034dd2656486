"""Runs one benchmark in two checkouts in turn, and compares the results.

python benchmark/compare_trees.py --before DIR --rounds 3 -- \
    benchmark/e2e/bench_decode.py --batch-size 1 16

The benchmark is a script of this repository whose last line is one JSON document; its
numbers are matched by their path in the document. The order is before, after, after,
before, ..., so that a drift of the machine affects both equally. The last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
SOURCES = ("python", "kv-canary/python")
# Members of a document that identify the case of a list element.
CASE_NAMES = ("case", "rows", "batch", "batch_size", "tree", "name", "kernel", "shape")


def numbers(document: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Return the numbers of a document by path, with list elements identified by
    case.
    """
    if isinstance(document, dict):
        for name, value in document.items():
            yield from numbers(value, f"{path}.{name}" if path else name)
    elif isinstance(document, list):
        for i, element in enumerate(document):
            yield from numbers(element, f"{path}[{case_name(element, i)}]")
    elif isinstance(document, (int, float)) and not isinstance(document, bool):
        yield path, float(document)


def case_name(element: Any, index: int) -> str:
    if not isinstance(element, dict):
        return str(index)
    named = [f"{name}={element[name]}" for name in CASE_NAMES if name in element]
    return " ".join(named) or str(index)


def run(tree: Path, command: list[str]) -> dict[str, float]:
    """Return the numbers of one run of `command` in `tree`.

    Raises:
        SystemExit: it failed, or its last line is not a JSON document.
    """
    paths = [str(tree / source) for source in SOURCES]
    inherited = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [inherited])])
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"{tree}: {command} failed\n{done.stderr[-4000:]}")
    try:
        return dict(numbers(json.loads(lines[-1])))
    except ValueError as error:
        raise SystemExit(f"{tree}: the last line is no JSON: {lines[-1]}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout")
    parser.add_argument("--after", type=Path, default=REPO, help="a checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="paths that contain this text")
    parser.add_argument("command", nargs="+", help="a benchmark and its arguments")
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "after": args.after.resolve()}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(args.rounds):
        sides = list(trees)
        for side in sides if turn % 2 == 0 else reversed(sides):
            for path, value in run(trees[side], args.command).items():
                found[path][side].append(value)
    rows = []
    print(f"{'measure':60} {'before':>10} {'after':>10} {'change':>8}  spreads")
    for path, sides_of_path in found.items():
        if args.only not in path or len(sides_of_path) < 2:
            continue
        before, after = sides_of_path["before"], sides_of_path["after"]
        medians = statistics.median(before), statistics.median(after)
        change = medians[1] / medians[0] - 1 if medians[0] else 0.0
        row = {"measure": path, "before": medians[0], "after": medians[1]}
        row |= {"change": change, "runs_before": before, "runs_after": after}
        rows.append(row)
        spreads = " / ".join(
            f"{(max(side) - min(side)) / abs(median or 1.0):.2%}"
            for side, median in zip((before, after), medians, strict=True)
        )
        print(
            f"{path[-60:]:60} {medians[0]:10.4g} {medians[1]:10.4g} {change:8.2%}  "
            f"{spreads}"
        )
    print(
        json.dumps(
            {"benchmark": "compare_trees", "command": args.command, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
