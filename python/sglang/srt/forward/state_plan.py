"""What a forward does with the slots of recurrent state besides its own fold.

A request's own state lies in the slot with the number of its row. Checkpoints lie in
the slots after the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopies:
    """Copies between state slots, int64 [N] each on the device. `dst` is distinct, and
    no slot is in both, but for slots that are copied to themselves.
    """

    dst: Tensor
    src: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DueCheckpoints:
    """Checkpoints that a decode step takes of the rows that reach them, which only the
    device knows: by the accepted path of a verification, or by one token. int64 [N]
    each, contiguous.

    Fields:
        rows: of the batch. ends: tokens before the checkpoint. slots: of checkpoints,
        distinct.
    """

    rows: Tensor
    ends: Tensor
    slots: Tensor

    def path_lens(self, prefix_lens: Tensor, accept_lens: Tensor) -> Tensor:
        """Return how many accepted nodes are folded into each checkpoint, [N]; 0 where
        the path does not reach it.

        Args:
            prefix_lens, accept_lens: [R], tokens folded before the verification, and
                accepted in it.
        """
        lens = self.ends - prefix_lens[self.rows]
        return lens.where((lens > 0) & (lens <= accept_lens[self.rows]), 0)

    def copies(self, slots: Tensor, lens: Tensor) -> StateCopies:
        """Return the copies from the rows' slots [R]; of scratch to itself where `lens`
        [N], of `path_lens`, is 0."""
        is_reached = lens > 0
        return StateCopies(
            dst=self.slots.where(is_reached, 0),
            src=slots[self.rows].where(is_reached, 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """Copies and checkpoints of one forward.

    Fields:
        restore: from checkpoints to rows, before the forward.
        track_lens, track_slots: int64 [R, K]; see `StateTracks`. Prefills only.
        save: from rows to checkpoints, after the forward.
        due: taken when a verification is committed.
    """

    restore: StateCopies | None = None
    track_lens: Tensor | None = None
    track_slots: Tensor | None = None
    save: StateCopies | None = None
    due: DueCheckpoints | None = None
