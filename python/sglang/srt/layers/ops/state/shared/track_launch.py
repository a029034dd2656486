"""Tracks as arguments of Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.utils.triton_launch import require

if TYPE_CHECKING:
    from sglang.srt.layers.ops.state.shared.tracks import StateTracks


def track_arguments(
    op: str, tracks: StateTracks | None, *, rows: int
) -> dict[str, Any]:
    """Return the arguments `track_lens`, `track_slots` and TRACKS (K) of a kernel.

    Raises:
        ValueError: the tensors are not those of `rows` rows.
    """
    if tracks is None:
        return {"track_lens": None, "track_slots": None, "TRACKS": 0}
    count = tracks.lens.shape[1]
    tensors = {"track_lens": tracks.lens, "track_slots": tracks.slots}
    require(op, rows * count, torch.int64, **tensors)
    return {**tensors, "TRACKS": count}
