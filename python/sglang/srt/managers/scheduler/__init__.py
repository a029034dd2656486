"""The scheduler process: `Scheduler` is importable from this package."""

from __future__ import annotations

from sglang.srt.managers.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
