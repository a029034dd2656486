"""Rows of recurrent state as the canary sees them: which slot holds which prefix.

A slot of state is the fold of all tokens before a position, so its record is that of
the last token folded: its position, the lineage up to it, and a fingerprint of the
bytes. Unlike KV, a state is overwritten by the next forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_canary.records import Launch
from kv_canary.view import require_vector

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """N prefixes and the slots that hold, or get, their states. int64, contiguous.

    Fields:
        slots: [N], as the kernels of the model get them; 0 is scratch and skipped.
        due_slots: [N], where these states lie by the records of the host.
        req_rows: [N], rows of the request table; 0 is padding, skipped.
        serials: [N], numbers of the requests.
        lengths: [N], tokens of the prefix; 0 has no state yet.
        lineages: lineages of the prefixes, by `lineage_rows` [N] or, without them, by
            `req_rows`.
        folded: int32 [slots, layers], contiguous in a slot, or None: tokens that the
            kernels of each layer have folded into a slot.
        marks: int32 [slots, layers], contiguous, or None: not 0 where the kernels of a
            layer loaded other bytes than were stored last. Cleared when reported.
    """

    slots: Tensor
    due_slots: Tensor
    req_rows: Tensor
    serials: Tensor
    lengths: Tensor
    lineages: Tensor
    lineage_rows: Tensor | None = None
    folded: Tensor | None = None
    marks: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]

    @property
    def lineage_index(self) -> Tensor:
        return self.req_rows if self.lineage_rows is None else self.lineage_rows

    def check_layout(self) -> None:
        """
        Raises:
            ValueError: a tensor is not a contiguous int64 vector.
        """
        for name in (*_VECTORS, "lineage_rows"):
            require_vector(f"StateRows: {name}", getattr(self, name))


_VECTORS = ("slots", "due_slots", "req_rows", "serials", "lengths", "lineages")


def loads_of(launch: Launch) -> Launch:
    """Return who found what a launch reads in marks: a sweep itself, or else the
    layers of the forward."""
    return launch if launch is Launch.SWEEP else Launch.ATTENTION
