"""Output of every benchmark: a table for people, then one JSON document in one line.

Knows no benchmark. Imports neither torch nor an engine.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Cell = str | int | float | None

_CPUINFO = Path("/proc/cpuinfo")


def rate(count: float, seconds: float) -> float:
    """Return `count / seconds`; 0.0, not a division by zero, if no time passed."""
    return count / seconds if seconds > 0.0 else 0.0


def ratio(value: float, base: float) -> float | None:
    """Return `value / base`; None if there is nothing to compare with."""
    return value / base if base > 0.0 and math.isfinite(value / base) else None


def format_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        parts = [first[0].ljust(first[1]), *(text.rjust(w) for text, w in rest)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def print_report(
    report: Json, *, output_file: str | None = None, compact: Json | None = None
) -> None:
    """Print `report` as the last line of stdout, and append it to `output_file`.

    Args:
        report: JSON-serialisable; NaN and infinity are refused.
        output_file: one line per run is appended.
        compact: printed instead of `report`, if the file should get more details.
    """
    line = json.dumps(report, allow_nan=False)
    if output_file is not None:
        with open(output_file, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    shown = line if compact is None else json.dumps(compact, allow_nan=False)
    print(shown, flush=True)


def provenance() -> Json:
    """Return the commit, date, machine and Python of a figure; names no host.

    `commit` ends in "-dirty" if the tree differs from it.
    """
    return {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    """Return the processor's model name."""
    for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)
