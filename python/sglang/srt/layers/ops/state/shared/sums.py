"""Checksums of states where torch operations load and store them, and as arguments of
Triton kernels. `kv_canary.state_sums` says what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_canary.state_sums import StateCells, state_sums

if TYPE_CHECKING:
    from sglang.srt.layers.ops.state.shared.tracks import StateTracks
    from sglang.srt.mem_cache.state_sums import StateSums


def compare_sums(
    sums: StateSums | None,
    state: Tensor,
    slots: Tensor,
    *,
    has_state: Tensor | None = None,
) -> None:
    """Compare slots [R] of `state`, before they change, with what was kept of them;
    not those of rows without a state. None compares nothing."""
    if sums is None:
        return
    require_sums(sums, state)
    differs = (sums.kept[slots] != state_sums(state[slots])).any(dim=1)
    if has_state is not None:
        differs &= has_state
    # No shape depends on the data, so that a graph can hold it.
    sums.marks.scatter_reduce_(0, slots, differs.to(torch.int32), "amax")


def keep_sums(
    sums: StateSums | None,
    state: Tensor,
    slots: Tensor,
    *,
    tracks: StateTracks | None = None,
) -> None:
    """Keep the sums of slots [R] of `state`, and of tracks, that were stored."""
    if sums is None:
        return
    if tracks is not None:
        slots = torch.cat((slots, tracks.slots[tracks.lens > 0]))
    sums.kept[slots] = state_sums(state[slots])


def require_sums(sums: StateSums, state: Tensor) -> None:
    """Raise ValueError unless there are sums for each slot of `state`."""
    expected = (len(state), StateCells.of(state).number)
    kept, marks = sums.kept, sums.marks
    is_kept = kept.dtype is torch.int64 and kept.shape == expected
    if not is_kept or (expected[1] > 1 and kept.stride(1) != 1):
        raise ValueError(
            f"sums: {kept.dtype} {list(kept.shape)} with strides "
            f"{list(kept.stride())}; expected torch.int64 {list(expected)}, contiguous "
            "in a slot"
        )
    if marks.dtype is not torch.int32 or marks.shape != state.shape[:1]:
        raise ValueError(
            f"sums: marks is {marks.dtype} {list(marks.shape)}; expected "
            f"torch.int32 [{len(state)}]"
        )


def sum_arguments(sums: StateSums | None, state: Tensor) -> dict[str, Any]:
    """Return the arguments of a Triton kernel that adds up: `checksums`, `marks` and
    their strides."""
    if sums is None:
        return dict.fromkeys(("checksums", "checksums_stride", "marks", "marks_stride"))
    require_sums(sums, state)
    return {
        "checksums": sums.kept,
        "checksums_stride": sums.kept.stride(0),
        "marks": sums.marks,
        "marks_stride": sums.marks.stride(0),
    }
