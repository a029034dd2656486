"""How many tokens each slot's state holds, counted where the state is stored.

Counts are int32 [slots] of any stride, or None if nothing compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.layers.ops.state.shared.tracks import StateTracks


def require_counts(folded: Tensor, state: Tensor) -> None:
    """Raise ValueError unless there is one count for each slot of `state`."""
    if folded.dtype is not torch.int32 or folded.shape != state.shape[:1]:
        raise ValueError(
            f"folded: {folded.dtype} {list(folded.shape)}; expected torch.int32 "
            f"[{len(state)}], one count per slot"
        )


def counts_or_scratch(folded: Tensor | None, state: Tensor) -> Tensor:
    """Return `folded`, or counts to write to that nobody reads."""
    if folded is None:
        return torch.zeros(len(state), dtype=torch.int32, device=state.device)
    require_counts(folded, state)
    return folded


def count_tokens(
    folded: Tensor | None,
    state: Tensor,
    *,
    slots: Tensor,
    lens: Tensor | int,
    has_state: Tensor | None = None,
    tracks: StateTracks | None = None,
) -> None:
    """Count `lens` more tokens of each row, and what its tracks hold.

    Args:
        lens: [R], or the same for all rows.
        has_state: [R] bool; a row without state starts at 0. None if all have one.
    """
    if folded is None:
        return
    require_counts(folded, state)
    before = folded[slots]
    if has_state is not None:
        before = before.where(has_state, 0)
    if tracks is not None:
        row, track = tracks.lens.nonzero(as_tuple=True)
        reached = before[row] + tracks.lens[row, track]
        folded[tracks.slots[row, track]] = reached.to(torch.int32)
    folded[slots] = (before + lens).to(torch.int32)


def count_arguments(folded: Tensor | None, state: Tensor) -> dict[str, Any]:
    """Return the arguments `folded` and `folded_stride` of a Triton kernel."""
    if folded is None:
        return {"folded": None, "folded_stride": None}
    require_counts(folded, state)
    return {"folded": folded, "folded_stride": folded.stride(0)}
