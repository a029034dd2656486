"""Where checksums of states are kept. Knows not how they are added up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSums:
    """Checksums of one layer's states.

    Fields:
        kept: [slots, cells] int64, of what each slot's last writer stored; contiguous
            in a slot.
        marks: [slots] int32; set to 1 where what was loaded has other sums.
    """

    kept: Tensor
    marks: Tensor
