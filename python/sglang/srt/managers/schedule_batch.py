"""An old path that other code imports; see `docs/adr/0033-rooms.md`."""

from __future__ import annotations

from sglang.srt.managers.batch.schedule_batch import ScheduleBatch

__all__ = ["ScheduleBatch"]
