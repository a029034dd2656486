"""An old path that other code imports; see `docs/adr/0033-rooms.md`."""

from __future__ import annotations

from sglang.srt.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode

__all__ = ["CaptureHiddenMode", "ForwardBatch", "ForwardMode"]
