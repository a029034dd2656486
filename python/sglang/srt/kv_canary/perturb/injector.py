"""An injector: a fault, when it is planted, and the reasons that must be reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_canary.checks import Reason
    from sglang.srt.kv_canary.perturb.damage import Damage, Scene

# Value of the KV elements in a slot whose copy was dropped.
STALE = 0.3125


class When(Enum):
    """The point of a launch at which an injector runs.

    BEFORE_STEP (a draft step) and ON_MOVE (between a move's bytes and its records)
    exist outside of CUDA graphs only.
    """

    BEFORE_FORWARD = "before"
    AFTER_FORWARD = "after"
    BEFORE_STEP = "step"
    ON_MOVE = "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injector:
    """A fault that can be planted.

    Fields:
        apply: plants the fault.
        reasons: at least one of them must be reported.
        when: the point at which it is planted.
    """

    apply: Callable[[Scene], Damage | None]
    reasons: Reason
    when: When = When.BEFORE_FORWARD
