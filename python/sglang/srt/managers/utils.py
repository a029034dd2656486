"""An old path that other code imports; see `docs/adr/0033-rooms.md`."""

from __future__ import annotations

from sglang.srt.arg_groups.draft_slots import get_alloc_len_per_decode
from sglang.srt.managers.batch.forward_result import GenerationBatchResult

__all__ = ["GenerationBatchResult", "get_alloc_len_per_decode"]
