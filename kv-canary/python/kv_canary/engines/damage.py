"""What mode `heal` has found, until the engine has taken the requests back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kv_canary.records import FIRST_CLOCK

if TYPE_CHECKING:
    from kv_canary.violation import Violation


class Damage:
    """Findings on their way to the engine, and the requests that it is to take back.

    Attributes:
        first_clock: the device's clock in the first forward that was checked.
        healed: number of requests that the engine has taken back.
    """

    def __init__(self) -> None:
        # Two threads: one collects what was found, one passes tokens on.
        self._found: deque[Violation] = deque()
        self._asked: set[str] = set()
        self.first_clock = FIRST_CLOCK
        self.healed = 0

    def note(self, found: Sequence[Violation]) -> None:
        self._found.extend(found)

    def take(self, forward: int) -> list[str] | None:
        """Return the requests that read or wrote what was found since the last call;
        None if nothing was found.

        Args:
            forward: number of the newest one whose tokens are about to leave. The rings
                may also hold what later ones found, which is returned once more then.
        """
        found = [self._found.popleft() for _ in range(len(self._found))]
        last = self.first_clock + forward - 1
        self._found.extend(each for each in found if each.forward > last)
        rids = {violation.rid for violation in found if violation.rid is not None}
        return sorted(rids) if found else None

    def ask(self, rids: Iterable[str]) -> None:
        """Note requests that the engine is asked to take back."""
        self._asked.update(rids)

    def take_back(self, released: Iterable[str]) -> list[str]:
        """Return those of some requests that were asked for, and forget them."""
        back = [rid for rid in released if rid in self._asked] if self._asked else []
        self._asked.difference_update(back)
        self.healed += len(back)
        return back
