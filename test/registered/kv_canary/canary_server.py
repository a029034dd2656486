"""The live server of the HTTP tests, found from this folder too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "http"))

from live_server import Server, greedy  # noqa: E402

__all__ = ["Server", "greedy"]
