"""Log lines about violations: enough to act on, but never a flood."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_canary.explain import explain

if TYPE_CHECKING:
    from pathlib import Path

    from kv_canary.violation import Violation

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
_REMEMBERED = 10_000


@dataclass(slots=True, kw_only=True)
class _Kind:
    """Violations of one diagnosis.

    Fields:
        last_line: time of the last line about one.
        held_back: violations since then that got no line. total: all violations.
    """

    last_line: float
    held_back: int = 0
    total: int = 0


class ReportLog:
    """Logs the first incident of each diagnosis in full, then one line per
    `QUIET_SECONDS` with the count, because a slot that stays damaged is found at every
    step.

    Args:
        with_tokens: whether lines include token ids.
        request_lines: most further lines per `QUIET_SECONDS`, each about a request that
            had no line of that diagnosis yet.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        *,
        with_tokens: bool,
        request_lines: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._with_tokens = with_tokens
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}
        self._request_lines = request_lines
        self._lines_left = request_lines
        self._lines_since = clock()
        # (diagnosis, serial) that had a line, the oldest first.
        self._told: OrderedDict[tuple[str, int], None] = OrderedDict()

    def violations(self, fresh: Sequence[Violation]) -> bool:
        """Log one line for each diagnosis that is due for one, and count the others.

        Returns whether a diagnosis is new, so that the incident should be explained.
        """
        by_name: dict[str, list[Violation]] = {}
        for violation in fresh:
            by_name.setdefault(violation.diagnosis_name, []).append(violation)
        is_new = not by_name.keys() <= self._kinds.keys()
        for name, found in by_name.items():
            self._of_one_kind(name, found, is_explained=is_new)
        return is_new

    def _of_one_kind(
        self, name: str, found: list[Violation], *, is_explained: bool
    ) -> None:
        now = self._clock()
        kind = self._kinds.get(name)
        is_due = kind is None or now - kind.last_line >= QUIET_SECONDS
        if kind is None:
            kind = self._kinds[name] = _Kind(last_line=now)
        kind.total += len(found)
        if is_due:
            self._tell(name, found[0])
        told = is_due + self._tell_requests(name, found)
        kind.held_back += 0 if is_explained else len(found) - told
        if not is_due:
            return
        if kind.held_back:
            logger.error(
                "kv_canary: %d more violation(s) in the last %.0f s, %d in all, of: %s",
                kind.held_back,
                now - kind.last_line,
                kind.total,
                found[0].diagnosis,
            )
        kind.last_line, kind.held_back = now, 0

    def _tell(self, name: str, violation: Violation) -> None:
        logger.error("%s", violation.line(with_tokens=self._with_tokens))
        self._told[name, violation.serial] = None
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)

    def _tell_requests(self, name: str, found: Sequence[Violation]) -> int:
        """Log a line for each request that had none, as long as lines are left. Returns
        how many."""
        now = self._clock()
        if now - self._lines_since >= QUIET_SECONDS:
            self._lines_left, self._lines_since = self._request_lines, now
        told = 0
        for violation in found:
            if self._lines_left == told:
                break
            if violation.serial and (name, violation.serial) not in self._told:
                self._tell(name, violation)
                told += 1
        self._lines_left -= told
        return told

    def explain(self, incident: dict[str, Any], file: Path | None) -> None:
        """Log the whole incident in words, and where its file is."""
        where = "" if file is None else f" in {file}"
        logger.error("kv_canary: incident%s:\n%s", where, explain(incident))
