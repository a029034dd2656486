"""Exit codes of a server."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a server has ended. Restarting helps after `FAILURE` alone."""

    DRAINED = 0
    """A signal, and every request was answered."""
    FAILURE = 1
    """The scheduler died, or the KV canary stopped it."""
    CONFIGURATION_ERROR = 2
    """The flags, the model or the address cannot be served."""
    DRAIN_TIMED_OUT = 3
    """A signal, and requests still ran after --drain-timeout; they got 503."""
    DRAIN_CUT_SHORT = 4
    """A second signal while requests ran; they got 503."""
