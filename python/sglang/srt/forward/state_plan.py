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
    no slot is in both.
    """

    dst: Tensor
    src: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """Copies and checkpoints of one forward.

    Fields:
        restore: from checkpoints to rows, before the forward.
        track_lens, track_slots: int64 [R, K]; see `StateTracks`. Prefills only.
        save: from rows to checkpoints, after the forward.
    """

    restore: StateCopies | None = None
    track_lens: Tensor | None = None
    track_slots: Tensor | None = None
    save: StateCopies | None = None
