"""What happens when a check finds damage: the same words in every host."""

from __future__ import annotations

from enum import Enum


class Mode(str, Enum):
    """The reaction to a violation.

    NONE, which plugins call OFF, checks nothing. LOG reports and continues. RAISE stops
    with the report as the error, before any token of that step leaves. HEAL reports,
    recomputes the damaged requests and continues, where the host can.
    """

    NONE = "none"
    OFF = "none"
    LOG = "log"
    RAISE = "raise"
    HEAL = "heal"

    @property
    def is_strict(self) -> bool:
        """Whether tokens leave only when their step's findings have arrived, and a host
        that cannot be checked does not start."""
        return self in (Mode.RAISE, Mode.HEAL)
