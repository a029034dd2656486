"""What a host lets its canary do, declared as data."""

from __future__ import annotations

from dataclasses import dataclass

from kv_canary.runtime.mode import Mode

PLUGIN_MODES = (Mode.OFF, Mode.LOG, Mode.RAISE)
"""Every plugin can report and stop."""
HEALING_MODES = (*PLUGIN_MODES, Mode.HEAL)
"""Where the engine takes requests back at a plugin's word, and computes them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCapabilities:
    """The capabilities of one host.

    Fields:
        modes: the modes it can carry out.
        can_sweep: whether slots that only the prefix cache holds can be checked.
        captures_launches: whether a graph may replay the launches of a forward without
            its Python code. If so, only the device's clock shows that they ran.
        shares_new_slots: whether a row may read slots that another row of the same
            forward fills. If so, all rows are stamped before any of them is verified.
    """

    modes: tuple[Mode, ...] = PLUGIN_MODES
    can_sweep: bool = True
    captures_launches: bool = False
    shares_new_slots: bool = False
