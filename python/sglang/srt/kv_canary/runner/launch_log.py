"""The newest launches of one pool: in which mode, and of which step of a draft, the
forward ran that found something."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kv_canary.evidence import DraftBranch
from kv_canary.records import Launch

if TYPE_CHECKING:
    from kv_canary.violation import Violation
    from sglang.srt.forward.batch import ForwardMode

REMEMBERED_LAUNCHES = 1024


class _Launched(NamedTuple):
    """A launch: number of its first forward on the device, how many it runs, and the
    branches of each request if it drafts."""

    clock: int
    forwards: int
    mode: ForwardMode
    topk: int | None


class LaunchLog:
    """Launches in order.

    Attributes:
        topk: branches of each request in a draft's next steps; None: no draft's pool.
    """

    def __init__(self, *, topk: int | None) -> None:
        self.topk = topk
        self._launches: deque[_Launched] = deque(maxlen=REMEMBERED_LAUNCHES)

    def __copy__(self) -> LaunchLog:
        other = LaunchLog(topk=self.topk)
        other._launches = self._launches.copy()
        return other

    def add(self, clock: int, forwards: int, mode: ForwardMode) -> None:
        self._launches.append(_Launched(clock, forwards, mode, self.topk))

    def clear(self) -> None:
        self._launches.clear()

    def branch_of(self, violation: Violation) -> DraftBranch | None:
        """Rows of a draft step are the branches of a request, request by request."""
        launch = self._find(violation.forward)
        if launch is None or violation.batch_row < 0 or launch.topk is None:
            return None
        if violation.launch == Launch.CARRIED.name.lower():
            # Its rows are requests.
            return None
        if not launch.mode.is_decode:
            return None
        return DraftBranch(
            step=violation.forward - launch.clock,
            branch=violation.batch_row % launch.topk,
        )

    def mode_of(self, violation: Violation) -> str | None:
        """Mode of the forward that found it, or "sweep"; None: too long ago."""
        if violation.launch == Launch.SWEEP.name.lower():
            return violation.launch
        launch = self._find(violation.forward)
        return None if launch is None else launch.mode.name.lower()

    def _find(self, forward: int) -> _Launched | None:
        for launch in reversed(self._launches):
            if 0 <= forward - launch.clock < launch.forwards:
                return launch
        return None
