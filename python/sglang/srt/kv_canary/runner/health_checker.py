"""A check that the canary runs: its launch counters must follow the forwards."""

from __future__ import annotations

from kv_canary.records import Counter

WARM_UP_FORWARDS = 100
CHECK_EVERY = 100

_REQUIRED = (Counter.VERIFY_LAUNCHES, Counter.HEAD_LAUNCHES, Counter.TAIL_LAUNCHES)


class HealthChecker:
    """Compares, every `CHECK_EVERY` forwards, the device's launch counters with the
    forwards that the host launched."""

    def __init__(self) -> None:
        self._forwards = 0
        self._due = WARM_UP_FORWARDS
        self._before: list[int] | None = None

    def on_result(self, counters: list[int]) -> None:
        """Check after one more forward, given the device's counters as of its end.

        Raises:
            RuntimeError: a launch did not run as often as the forwards; names it.
        """
        self._forwards += 1
        if self._forwards < self._due:
            return
        self._due += CHECK_EVERY
        before, self._before = self._before, counters
        if before is None:
            return
        for counter in _REQUIRED:
            ran = counters[counter] - before[counter]
            if ran < CHECK_EVERY:
                raise RuntimeError(
                    f"the KV canary is not running: {counter.name.lower()} advanced "
                    f"by {ran} during {CHECK_EVERY} forwards"
                )
