"""Write the tables of faults in the guides from the catalogue of faults, and those of
runs in other engines from `docs/soak/plugin_runs.jsonl`.

A table stands between `<!-- faults: NAME -->` and `<!-- end -->`; `TABLES` has the
names. `--check` writes nothing and exits 1 if a table is not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
for source in ("kv-canary/python", "python", ""):
    sys.path.insert(0, str(REPO / source))

from kv_canary.checks import reason_labels  # noqa: E402
from kv_canary.faults.catalogue import (  # noqa: E402
    CATALOGUE,
    WRONG_RECORD,
    WRONG_RECORD_REASONS,
    planted_in,
)
from kv_canary.faults.fault import Fault, HostEngine, Planted, Serving  # noqa: E402
from kv_canary.faults.incidents import INCIDENTS, Incident  # noqa: E402
from scripts.mutation.areas import AREAS  # noqa: E402
from scripts.mutation.operators import OPERATORS  # noqa: E402
from scripts.mutation.worlds import WORLDS, World  # noqa: E402
from sglang.faults.fault_points import FAULT_POINTS  # noqa: E402

PAGES = (
    "docs/incidents.md",
    "docs/kv_canary_faults.md",
    "docs/mutation.md",
    "kv-canary/README.md",
)
RUNS = "docs/soak/plugin_runs.jsonl"
Json = dict[str, Any]
BLOCK = re.compile(r"(<!-- faults: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SERVING = {
    Serving.ALL: "P, S",
    Serving.PLAIN: "P",
    Serving.SPECULATION: "S",
    Serving.TREE: "T",
}


def reported_as(fault: Fault) -> str:
    labels = list(reason_labels(fault.reasons))
    if set(WRONG_RECORD_REASONS) <= set(labels):
        rest = [label for label in labels if label not in WRONG_RECORD_REASONS]
        labels = [WRONG_RECORD, *rest]
    needed = " (`all`)" if fault.needs_all else ""
    return ", ".join(f"`{label}`" for label in labels) + needed


def called(fault: Fault) -> str:
    return ", in SGLang ".join(f"`{name}`" for name in (fault.name, *fault.upstream))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (columns, ["---"] * len(columns), *rows)
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return text.replace("|  |", "| |")


COLUMNS: dict[str, Callable[[Fault], str]] = {
    "fault": called,
    "in": lambda fault: SERVING[fault.serving],
    "what it does": lambda fault: fault.what,
    "needs": lambda fault: "; ".join(n.text for n in FAULT_POINTS[fault.name].needs),
    "without": lambda fault: fault.harm.value,
    "reported as": reported_as,
    "by": lambda fault: fault.bound.value,
    "seen": lambda fault: fault.names,
    "in vLLM": lambda fault: fault.hosts.get(HostEngine.VLLM, ""),
    "in SGLang": lambda fault: fault.hosts.get(HostEngine.SGLANG, ""),
}


def view(columns: str, *places: Planted) -> Callable[[], str]:
    """Return a table of the faults in these places, or of faults with hosts if there
    are none.
    """
    titles = columns.split(", ")
    faults = planted_in(*places).values() if places else filter(has_host, CATALOGUE)
    rows = [[COLUMNS[title](fault) for title in titles] for fault in faults]
    return lambda: table(titles, rows)


def has_host(fault: Fault) -> bool:
    return bool(fault.hosts)


def incidents() -> str:
    return table(
        (
            *("incident", "seen", "what went wrong", "planted as", "reported as"),
            "in a stock vLLM",
        ),
        (
            (
                *(one.name, one.seen, one.mechanism, planted_as(one), reports_of(one)),
                in_vllm(one),
            )
            for one in INCIDENTS
        ),
    )


def in_vllm(incident: Incident) -> str:
    names = (fault.hosts.get(HostEngine.VLLM) for fault in incident.faults)
    return ", ".join(filter(None, names))


def planted_as(incident: Incident) -> str:
    tests = (f"`{Path(name).name}`" for name in incident.tests)
    names = [*(f"`{fault.name}`" for fault in incident.faults), *tests]
    return ", ".join(names) or "not planted"


def reports_of(incident: Incident) -> str:
    return ", ".join(
        dict.fromkeys(
            part
            for fault in incident.faults
            for part in reported_as(fault).removesuffix(" (`all`)").split(", ")
        )
    )


def areas() -> str:
    return table(
        ("area", "modules", "faults of the catalogue"),
        (
            (
                area.name,
                ", ".join(f"`{name}`" for name in area.modules),
                str(sum(fault.place is area.place for fault in CATALOGUE)),
            )
            for area in AREAS
        ),
    )


def operators() -> str:
    return table(
        ("operator", "what a person got wrong"),
        (
            (name, " ".join((operator.__doc__ or "").split()).rstrip("."))
            for name, operator in OPERATORS.items()
        ),
    )


def worlds() -> str:
    return table(
        ("engine", "runs", "page size", "model", "draft", "requests", "also"),
        (
            (
                world.name,
                world.kind.name.lower(),  # type: ignore[union-attr]
                str(world.page_size),
                world.model,
                world.draft and f"{world.draft}, {' x '.join(map(str, world.tree))}",
                world.asks,
                also(world),
            )
            for world in WORLDS
        ),
    )


def also(world: World) -> str:
    """Return what a world has besides its engine."""
    parts = [f"`{name}`" for name in world.options]
    if world.has_front:
        parts.append("the front")
    if world.damage_every:
        parts.append(f"a damage every {world.damage_every} steps")
    if world.ranks > 1:
        parts.append(f"{world.ranks} ranks")
    return ", ".join(parts)


def runs() -> str:
    """Return what self-tests and clean traffic in vLLM have shown, a row for each
    engine, runner and device."""
    lines = (REPO / RUNS).read_text(encoding="utf-8").splitlines()
    by_host: dict[tuple[str, str], list[Json]] = {}
    for run in map(json.loads, lines):
        host = f"`{run['engine']}`, {run['on']}"
        by_host.setdefault((host, run["runner"]), []).append(run)
    return table(
        ("engine", "runner", "faults named", "slot reads of clean traffic"),
        (
            (
                *host,
                "; ".join(_named(run) for run in of_host if "named" in run),
                "; ".join(_traffic(run) for run in of_host if "verified" in run),
            )
            for host, of_host in by_host.items()
        ),
    )


def _named(run: Json) -> str:
    """A self-test prints the number named of each class; old records have sums."""
    named = run["named"]
    by_class = isinstance(named, dict)
    classes = len(named) if by_class else run["classes"]
    count, due = sum(named.values()) if by_class else named, classes * run["seeds"]
    share = "all" if count == due else f"{count} of {due}"
    of_class = "1 class" if classes == 1 else f"{classes} classes"
    return f"{run['what']}: {of_class} x {run['seeds']}, {share}"


def _traffic(run: Json) -> str:
    alarms = f", **{run['violations']} alarms**" if run["violations"] else ""
    other = "" if run["equal"] else ", **other outputs**"
    return f"{run['what']}: {run['verified']:,}{alarms}{other}"


IN_SLOTS = "fault, what it does, reported as, by"
TABLES: dict[str, Callable[[], str]] = {
    "pools": view(IN_SLOTS, Planted.POOL, Planted.SAMPLING),
    "windows": view(IN_SLOTS, Planted.WINDOW),
    "states": view(IN_SLOTS, Planted.STATE),
    "identity": view(IN_SLOTS, Planted.IDENTITY),
    "drafts": view(IN_SLOTS, Planted.DRAFT),
    "tiers": view(IN_SLOTS, Planted.TIER),
    "steps": view("fault, in, what it does, without, reported as, by", Planted.STEP),
    "start": view("fault, what it does, needs, reported as, seen", Planted.START),
    "plugins": view("what it does, in vLLM, in SGLang, reported as"),
    "incidents": incidents,
    "areas": areas,
    "operators": operators,
    "worlds": worlds,
    "runs": runs,
}


def rendered(text: str) -> str:
    """Return a page with its tables updated from the catalogue."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if one is stale")
    is_check, stale = parser.parse_args().check, []
    for name in PAGES:
        before = (REPO / name).read_text(encoding="utf-8")
        after = rendered(before)
        if after != before:
            stale.append(name)
        if not is_check:
            (REPO / name).write_text(after, encoding="utf-8")
    verb = "stale" if is_check else "wrote"
    for name in stale:
        print(f"{verb}: {name}")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
