"""The one list of faults. Anything that plants, expects or describes faults is a view
of it.

`catalogue.tsv` has a row per fault; `Fault` says what the columns mean. `-` is an empty
cell, multiple values are separated by spaces, and `verify_*` stands for every reason of
a wrong record. The last column holds what few faults need: `variable`, `upstream`,
`bytes`, and the name in the self-test of `vllm` and `sglang`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from enum import Flag
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TypeVar

from kv_canary.checks import Reason
from kv_canary.faults.fault import (
    Bound,
    Fault,
    FaultPlace,
    Harm,
    HostEngine,
    Planted,
    Serving,
    SlotGroup,
)

F = TypeVar("F", bound=Flag)

WRONG_RECORD = "verify_*"
WRONG_RECORD_REASONS = (
    "verify_lineage",
    "verify_position",
    "verify_token",
    "verify_freed",
)
_TABLE = Path(__file__).with_suffix(".tsv")


def _read(table: Path) -> tuple[Fault, ...]:
    """Read the table.

    Raises:
        KeyError, ValueError: a cell has an unknown value for its column.
    """
    with table.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return tuple(_fault(row) for row in rows)


def _fault(row: dict[str, str]) -> Fault:
    cells = {column: "" if cell == "-" else cell for column, cell in row.items()}
    more = dict(part.split("=", 1) for part in cells["more"].split("; ") if part)
    reasons = cells["reasons"].replace(WRONG_RECORD, " ".join(WRONG_RECORD_REASONS))
    upstream = more.get("upstream", "")
    return Fault(
        planted=Planted(cells["planted"]),
        name=cells["name"],
        place=FaultPlace(cells["place"]),
        groups=_flags(SlotGroup, cells["groups"]),
        serving=_flags(Serving, cells["serving"]),
        reasons=_flags(Reason, reasons),
        bound=Bound[cells["bound"].upper()],
        harm=Harm(cells["harm"]),
        what=cells["what"],
        names=cells["names"],
        variable=more.get("variable", ""),
        upstream=tuple(upstream.split(",")) if upstream else (),
        hosts={
            engine: more[engine.value] for engine in HostEngine if engine.value in more
        },
        needs_all=more.get("bytes") == "all",
    )


def _flags(kind: type[F], cell: str) -> F:
    return reduce(or_, (kind[word.upper()] for word in cell.split()), kind(0))


def planted_in(*places: Planted) -> Mapping[str, Fault]:
    """Return the faults that act in these places, by name."""
    return {fault.name: fault for fault in CATALOGUE if fault.planted in places}


def in_serving(faults: Mapping[str, Fault], serving: Serving) -> list[str]:
    """Return the names of faults that can occur in one of these ways of decoding."""
    return [name for name, fault in faults.items() if fault.serving & serving]


def by_host_name(engine: HostEngine) -> Mapping[str, Fault]:
    """Return the faults of a plugin's self-test, by the name that it prints."""
    return {f.hosts[engine]: f for f in CATALOGUE if engine in f.hosts}


CATALOGUE = _read(_TABLE)
POOL_FAULTS = planted_in(Planted.POOL)
DRAFT_FAULTS = planted_in(Planted.DRAFT)
STEP_FAULTS = planted_in(Planted.STEP)
START_FAULTS = planted_in(Planted.START)
STATE_FAULTS = planted_in(Planted.STATE)
TIER_FAULTS = planted_in(Planted.TIER)
IDENTITY_FAULTS = planted_in(Planted.IDENTITY)
WINDOW_FAULTS = {
    fault.name: fault
    for fault in CATALOGUE
    if fault.planted in (Planted.POOL, Planted.WINDOW)
    and SlotGroup.WINDOW in fault.groups
}
