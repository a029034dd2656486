"""Slots of recurrent state: one per request row, and checkpoints of the prefix cache.

```
slot   0        1 .. rows                 rows + 1 .. rows + size
       scratch  request rows, one each    checkpoints
```
A running request's own state needs no records: it lies in the slot with the number of
its row. A checkpoint is the state after exactly the tokens before a position. It
belongs to the request that took it until the tree has a run that ends there.

These are host records. Copies between slots run in stream order, so a slot may be given
to the next owner at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.mem_cache.groups.saved_states import HeldCheckpoint, SavedHold
from sglang.srt.mem_cache.groups.slots import GroupHold, GroupSlots
from sglang.srt.mem_cache.groups.state_runs import StateRuns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.radix_cache import RadixCache


class StateHold(GroupHold):
    """The checkpoints of a request that are not in the tree yet.

    Attributes:
        tracked: taken while its prompt was prefilled, ascending.
        saved: the last one taken while it decoded.
        due: one that a verification in flight may take; slot 0 if none was free.
    """

    __slots__ = ("due", "saved", "tracked")

    def __init__(self, kept_from: int) -> None:
        super().__init__(kept_from)
        self.tracked: list[HeldCheckpoint] = []
        self.saved: HeldCheckpoint | None = None
        self.due: HeldCheckpoint | None = None

    def checkpoints(self) -> Sequence[HeldCheckpoint]:
        saved = () if self.saved is None else (self.saved,)
        return (*self.tracked, *saved)

    def cuts(self) -> Iterable[int]:
        return [held.position for held in self.checkpoints()]

    def expect(self, position: int, slot: int) -> int:
        """Note a checkpoint that is due at a position, and return its slot."""
        self.due = HeldCheckpoint(position, slot)
        return slot

    def save(self) -> SavedHold:
        return SavedHold(tracked=[*self.tracked], saved=self.saved, due=self.due)

    def load(self, saved: SavedHold) -> None:
        """Hold what was saved."""
        self.tracked = [*saved.tracked]
        self.saved, self.due = saved.saved, saved.due

    def take(self, position: int) -> int:
        """Give up the checkpoint at a position; return its slot, or 0 without one."""
        if self.saved is not None and self.saved.position == position:
            slot, self.saved = self.saved.slot, None
            return slot
        for index, held in enumerate(self.tracked):
            if held.position == position:
                return self.tracked.pop(index).slot
        return 0


class StateSlots(GroupSlots):
    """Checkpoint slots.

    Args:
        rows: request rows, whose slots come before the checkpoints.
        size: checkpoints.
    """

    name = "state"
    page_size = 1
    unsaved = ""

    def __init__(self, *, rows: int, size: int) -> None:
        if rows < 1 or size < 1:
            raise ValueError(
                f"{size} checkpoints beside {rows} request rows: there must be at "
                "least one of each"
            )
        self.rows = rows
        self.size = size
        self._free: list[int] = []
        self._used: set[int] = set()
        self._aside: set[int] = set()
        self._on_free: list[Callable[[torch.Tensor], None]] = []
        self.clear()

    # -- capacity ------------------------------------------------------------------

    def available_size(self) -> int:
        return len(self._free)

    def cost(self, num_slots: int) -> int:
        return 0

    # A request runs without checkpoints if there are none to take.
    def need_of_running(self, hold: GroupHold, length: int, slots: int) -> int:
        return 0

    def need_of_new(self, extend_len: int, slots: int) -> int:
        return 0

    def is_used(self, slot: int) -> bool:
        return slot in self._used

    def take(self) -> int:
        """Take a slot and return it, or 0 if none is free."""
        if not self._free:
            return 0
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def give(self, slot: int) -> None:
        """Free a slot; RuntimeError if it is not in use."""
        if slot not in self._used:
            raise RuntimeError(f"state slot {slot} is freed but not in use")
        self._used.remove(slot)
        self._free.append(slot)
        self._notify([slot])

    def register_on_free(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Call `hook(slots)`, int64 on the host, at every free, before any of them can
        be taken again."""
        self._on_free.append(hook)

    def _notify(self, slots: Sequence[int]) -> None:
        for hook in self._on_free:
            hook(torch.tensor(slots))

    def clear(self) -> None:
        """Free every slot but those that are set aside."""
        if freed := self._used - self._aside:
            self._notify(sorted(freed))
        self._used = set(self._aside)
        every = range(self.rows + self.size, self.rows, -1)
        self._free = [slot for slot in every if slot not in self._used]

    def save(self) -> list[int]:
        """Return the free slots, in reverse order of reuse."""
        return list(self._free)

    def load(self, free: Sequence[int]) -> None:
        """Let exactly these slots be free.

        Raises:
            ValueError: there are no such slots.
        """
        every = set(range(self.rows + 1, self.rows + self.size + 1))
        if len(set(free)) != len(free) or not every.issuperset(free):
            raise ValueError(f"free state slots {sorted(free)[:8]} of {self.size}")
        self._free, self._used = list(free), every.difference(free)

    # -- quarantine: a page is a slot ----------------------------------------------

    def owns(self, pages: IntArray) -> NDArray[np.bool_]:
        """Return whether each of these slots is in use."""
        return np.array([slot in self._used for slot in pages.tolist()], dtype=np.bool_)

    def set_aside(self, pages: IntArray) -> None:
        """Take these distinct free slots out of use; `clear` leaves them so.

        Raises:
            RuntimeError: one of them is in use.
        """
        for slot in set(pages.tolist()) - self._aside:
            if slot in self._used:
                raise RuntimeError(f"state slot {slot} is set aside but in use")
            self._free.remove(slot)
            self._used.add(slot)
            self._aside.add(slot)

    def page_slots(self, pages: IntArray) -> IntArray:
        return pages

    def free(self, slots: torch.Tensor) -> None:
        """Free slots that were set aside."""
        for slot in slots.tolist():
            self._aside.remove(slot)
            self.give(slot)

    # -- lifetime ------------------------------------------------------------------

    def hold(self, length: int) -> StateHold:
        return StateHold(length)

    def renew(self, hold: GroupHold, length: int) -> StateHold:
        """Return a hold with the checkpoints past `length`, which a later forward
        takes; the tree did not want the others."""
        assert isinstance(hold, StateHold)
        new = StateHold(length)
        for held in hold.tracked:
            if held.position > length:
                new.tracked.append(held)
            else:
                self.give(held.slot)
        new.saved, new.due = hold.saved, hold.due
        return new

    def release(self, hold: GroupHold) -> None:
        assert isinstance(hold, StateHold)
        for held in hold.checkpoints():
            self.give(held.slot)
        if hold.due is not None and hold.due.slot:
            self.give(hold.due.slot)
        hold.tracked, hold.saved, hold.due = [], None, None

    def create_runs(self, cache: RadixCache, index: int) -> StateRuns:
        return StateRuns(cache, self, index=index)
