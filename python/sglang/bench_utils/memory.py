"""Resident memory of processes."""

from __future__ import annotations

from pathlib import Path


def resident_mib(pid: int) -> float:
    """Return the memory of a process in MiB, or 0 if it has exited."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def family_mib(pid: int) -> float:
    """Return the memory of a process and its children in MiB, such as a server's front
    and schedulers.
    """
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return sum(map(resident_mib, [pid, *children]))
