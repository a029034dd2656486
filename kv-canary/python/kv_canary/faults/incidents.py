"""Public incidents of wrong KV, and the planted faults that stand for them.

`incidents.tsv` has a row per incident: where it was reported, when it was seen, what
went wrong, the faults of the catalogue (`planted.name`) that damage the same thing in
the same way, and the files of tests that plant what the catalogue does not list. `-` is
an empty cell.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kv_canary.faults.catalogue import CATALOGUE

if TYPE_CHECKING:
    from kv_canary.faults.fault import Fault

_TABLE = Path(__file__).with_suffix(".tsv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One incident.

    Fields:
        name: project and number of the report.
        seen: year, and month where it is known.
        mechanism: what went wrong, in one line.
        faults: planted faults of this kind.
        tests: files of further tests that plant it, from the repository's root.
    """

    name: str
    seen: str
    mechanism: str
    faults: tuple[Fault, ...]
    tests: tuple[str, ...]

    @property
    def is_planted(self) -> bool:
        return bool(self.faults or self.tests)


def _read(table: Path) -> tuple[Incident, ...]:
    """Read the table.

    Raises:
        KeyError: the catalogue has no fault of a name.
    """
    by_name = {f"{fault.planted.value}.{fault.name}": fault for fault in CATALOGUE}
    with table.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return tuple(
            Incident(
                name=row["incident"],
                seen=row["seen"],
                mechanism=row["mechanism"],
                faults=tuple(by_name[name] for name in _words(row["faults"])),
                tests=_words(row["tests"]),
            )
            for row in rows
        )


def _words(cell: str) -> tuple[str, ...]:
    return () if cell == "-" else tuple(cell.split())


INCIDENTS = _read(_TABLE)
