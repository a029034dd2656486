"""What each slot of recurrent state holds, as one array, from the host's records.

For people who inspect the pool, like `page_map`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sglang.srt.mem_cache.page_map import SERIAL_MASK, PageHolder

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.page_ledger import IntArray


class SlotState(IntEnum):
    """The state of a slot.

    FREE: not held. RUNNING: the state of a request. CHECKPOINT: of the prefix cache.
    TAKEN: a checkpoint of a request, which the cache gets with its tokens. QUARANTINED:
    damaged, watched or kept out of use.
    """

    FREE = 0
    RUNNING = 1
    CHECKPOINT = 2
    TAKEN = 3
    QUARANTINED = 4


class SlotColumn(IntEnum):
    """Columns of `state_table`.

    POSITION: tokens folded into the state, by the host's count; 0 for none. HOLDER: the
    serial of a request, minus the serial of a cached run (both modulo 2^27), or 0.
    """

    STATE = 0
    POSITION = 1
    HOLDER = 2


def state_table(
    cache: BasePrefixCache, holders: Iterable[PageHolder], *, set_aside: IntArray
) -> NDArray[np.int32]:
    """Return a row for every slot but scratch, int32 [slots, len(SlotColumn)]; slot s
    is at s - 1. Empty if the cache has no checkpoints.

    Args:
        holders: requests, including those without memory.
        set_aside: slots of damaged checkpoints.
    """
    runs = cache.checkpoints
    if runs is None:
        return np.empty((0, len(SlotColumn)), dtype=np.int32)
    slots = runs.slots
    table = np.zeros((slots.rows + slots.size + 1, len(SlotColumn)), dtype=np.int32)
    for holder in holders:
        row, serial = holder.req_pool_idx, holder.serial & SERIAL_MASK
        if not row:
            continue
        table[row] = SlotState.RUNNING, holder.committed_len, serial
        for held in runs.hold_of(holder.holds).checkpoints():
            table[held.slot] = SlotState.TAKEN, held.position, serial
    for node in cache.iter_nodes():
        if runs.has_checkpoint(node):
            entry = SlotState.CHECKPOINT, node.end, -(node.serial & SERIAL_MASK)
            table[runs.slot_at(node)] = entry
    table[set_aside] = SlotState.QUARANTINED, 0, 0
    return table[1:]
