"""What plants each fault in slots and tables: the function with the fault's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

from kv_canary.faults.catalogue import (
    DRAFT_FAULTS,
    POOL_FAULTS,
    STATE_FAULTS,
    WINDOW_FAULTS,
)
from sglang.faults.pools import (
    checkpoints,
    inputs,
    slots,
    speculation,
    states,
    windows,
)
from sglang.faults.pools.scene import PoolPlanter, When
from sglang.faults.settings import FULL, STATE, SWA

_WHEN = {
    "real_kv_post_forward": When.AFTER_FORWARD,
    "drop_draft_extend_rows": When.AFTER_FORWARD,
    "late_checkpoint": When.AFTER_FORWARD,
    "branch_offset": When.BEFORE_STEP,
    "wrong_ancestor": When.BEFORE_STEP,
    "short_reserve": When.BEFORE_STEP,
    "short_branch_table": When.BEFORE_STEP,
    "small_index_buffer": When.BEFORE_STEP,
    "idle_row_write": When.BEFORE_STEP,
    "moved_without_record": When.ON_MOVE,
    "record_without_kv": When.ON_MOVE,
    "skipped_move": When.ON_MOVE,
}


def _planters(names: Iterable[str], *modules: ModuleType) -> Mapping[str, PoolPlanter]:
    """Return the planters of these faults, each from the first module that has it."""
    return {
        name: PoolPlanter(
            apply=next(
                vars(module)[name] for module in modules if hasattr(module, name)
            ),
            when=_WHEN.get(name, When.BEFORE_FORWARD),
        )
        for name in names
    }


PLANTERS: Mapping[str, Mapping[str, PoolPlanter]] = {
    FULL: _planters((*POOL_FAULTS, *DRAFT_FAULTS), inputs, slots, speculation),
    SWA: _planters(WINDOW_FAULTS, windows, slots),
    STATE: _planters(STATE_FAULTS, states, checkpoints),
}
"""By the group of slots that is damaged, and the fault's name."""
