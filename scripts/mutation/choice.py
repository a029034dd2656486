"""Chooses the faults to plant: all, some by name, or a sample over areas and
operators.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.mutation.mutants import mutants
from scripts.mutation.sites import Mutant
from scripts.mutation.targets import Area, module_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A mutant and its area."""

    area: Area
    mutant: Mutant


def all_faults(areas: Sequence[Area]) -> list[Fault]:
    """Return the faults of all modules in these areas, in source order."""
    return [
        Fault(area=area, mutant=mutant)
        for area in areas
        for module in area.names
        for mutant in mutants(module, module_path(module).read_text(encoding="utf-8"))
    ]


def only(faults: Sequence[Fault], place: str) -> list[Fault]:
    """Return the faults of `module` or `module:line`; the last part of a module's name
    is enough.
    """
    module, _, line = place.partition(":")
    return [
        fault
        for fault in faults
        if f".{fault.mutant.module}".endswith(f".{module}")
        and (not line or fault.mutant.line == int(line))
    ]


def sample(faults: Sequence[Fault], *, count: int, seed: int) -> list[Fault]:
    """Return about `count` faults: equally many of each area, if it has enough, taking
    operators in turn so that frequent ones do not crowd out the rest.
    """
    rng = random.Random(seed)
    by_area: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_area[fault.area.name].append(fault)
    queues = [_in_turn(found, rng) for found in by_area.values()]
    chosen: list[Fault] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop())
    return chosen


def _in_turn(faults: list[Fault], rng: random.Random) -> list[Fault]:
    """Return the faults in the order for `pop`."""
    by_operator: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_operator[fault.mutant.operator].append(fault)
    queues = [rng.sample(found, len(found)) for found in by_operator.values()]
    rng.shuffle(queues)
    order: list[Fault] = []
    while any(queues):
        order += [queue.pop() for queue in queues if queue]
    return order[::-1]
