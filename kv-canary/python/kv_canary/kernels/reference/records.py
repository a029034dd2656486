"""Changes of records outside a forward in torch: poison and moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_canary.records import POISON_WORD, WriterKind, pack_word3_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState


def poison(state: CanaryState, slots: Tensor, n_live: Tensor | None) -> None:
    """See `launches.poison`."""
    if n_live is not None:
        slots = slots[: int(n_live)]
    slots = slots[(slots >= 0) & (slots < state.num_slots)]
    for records in (state.head, state.tail):
        known = slots[records[slots, 0] != POISON_WORD]
        word3 = pack_word3_tensor(state.clock, WriterKind.POISON, records[known, 3])
        records[known, 0] = POISON_WORD
        records[known, 3] = word3


def announce_heads(state: CanaryState, slots: Tensor) -> None:
    """Set the tail records of slots [n] int64 to their heads; see `launches.stamp`.
    Ids outside the pool are skipped."""
    is_slot = (slots >= 0) & (slots < state.num_slots)
    # Slot 0 is scratch; both halves of its records are poison.
    slots = slots * is_slot
    state.tail.index_copy_(0, slots, state.head.index_select(0, slots))


def move_records(state: CanaryState, dst: Tensor, src: Tensor) -> None:
    """See `launches.move_records`."""
    for records in (state.head, state.tail):
        records.index_copy_(0, dst, records.index_select(0, src))
