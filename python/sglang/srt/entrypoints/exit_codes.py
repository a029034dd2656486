"""Exit codes of a server."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a server has exited. Restarting helps only after `FAILURE`."""

    DRAINED = 0
    """A signal arrived and every request was answered."""
    FAILURE = 1
    """The scheduler died, or the KV canary stopped it."""
    CONFIGURATION_ERROR = 2
    """The flags, the model or the address cannot be served."""
    DRAIN_TIMED_OUT = 3
    """A signal arrived and requests were still running after --drain-timeout; they got
    503.
    """
    DRAIN_CUT_SHORT = 4
    """A second signal arrived while requests were running; they got 503."""
