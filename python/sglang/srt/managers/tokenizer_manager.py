"""An old path that other code imports; see `docs/adr/0033-rooms.md`."""

from __future__ import annotations

from sglang.srt.managers.front.tokenizer_manager import TokenizerManager

__all__ = ["TokenizerManager"]
