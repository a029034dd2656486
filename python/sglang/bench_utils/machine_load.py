"""Processor use by side and by other processes during a measurement.

A comparison is fair only if the waiting sides slept and no other process computed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang.bench_utils.report import rate

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/<pid>/stat after the command's closing parenthesis.
_PPID, _UTIME, _STIME = 1, 11, 12
# Fields of a cpu line of /proc/stat: user nice system idle iowait irq softirq steal.
_IDLE_FIELDS = (3, 4)
_COUNTED_FIELDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUsage:
    """Mean number of cores in use over a measurement.

    Fields:
        active: by the side that was measured.
        waiting: by the sides that were not.
        foreign: by everything else on the watched cores.
    """

    active: float
    waiting: float
    foreign: float


class LoadWatch:
    """Watches process trees and cores from its creation to `usage`.

    Args:
        roots: name of a side -> process id of the root of its tree.
        cores: the cores that the sides are pinned to.
    """

    def __init__(self, roots: Mapping[str, int], cores: Collection[int]) -> None:
        self._roots = roots
        self._cores = cores
        self._began = time.perf_counter()
        self._busy = _busy_seconds(cores)
        self._used = _used_seconds(roots)

    def usage(self, active: str) -> MachineUsage:
        """Return the use since the creation; `active` is the side that was measured."""
        wall = time.perf_counter() - self._began
        busy = _busy_seconds(self._cores) - self._busy
        used = {
            name: max(seconds - self._used[name], 0.0)
            for name, seconds in _used_seconds(self._roots).items()
        }
        every = sum(used.values())
        return MachineUsage(
            active=rate(used[active], wall),
            waiting=rate(every - used[active], wall),
            foreign=rate(max(busy - every, 0.0), wall),
        )


def _busy_seconds(cores: Collection[int]) -> float:
    """Return the total seconds that `cores` were busy since the machine started."""
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in (_PROC / "stat").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(" ")
        if name in names:
            fields = [int(field) for field in rest.split()[:_COUNTED_FIELDS]]
            ticks += sum(fields) - sum(fields[i] for i in _IDLE_FIELDS)
    return ticks / _TICKS


def _used_seconds(roots: Mapping[str, int]) -> dict[str, float]:
    """Return the processor seconds of each tree's living processes."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for path in _PROC.iterdir():
        if not path.name.isdigit():
            continue
        try:
            text = (path / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it ended meanwhile
        fields = text.rpartition(")")[2].split()
        pid = int(path.name)
        parents[pid] = int(fields[_PPID])
        seconds[pid] = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS
    owners = {pid: name for name, pid in roots.items()}
    totals = dict.fromkeys(roots, 0.0)
    for pid, used in seconds.items():
        ancestor = pid
        while ancestor and ancestor not in owners:
            ancestor = parents.get(ancestor, 0)
        if ancestor:
            totals[owners[ancestor]] += used
    return totals
