"""An old path that other code imports; see `docs/adr/0033-rooms.md`."""

from __future__ import annotations

from sglang.srt.draft_trees.draft_input import (
    BranchColumns,
    EagleDraftInput,
    duplicate_prefix_tail_to_draft_branches,
)

__all__ = [
    "BranchColumns",
    "EagleDraftInput",
    "duplicate_prefix_tail_to_draft_branches",
]
