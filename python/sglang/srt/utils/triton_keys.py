"""Names that Triton gives to compiled kernels on disk, the same in every process.

Triton 3.6 and 3.7 hash the constants that a kernel's helper functions read only where
some other kernel had the helper hashed before, and order constants of one name by the
addresses of their modules. So a name depends on the order of imports and of the first
launches: a process may compile again what another one has left.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


@functools.cache
def make_keys_stable() -> None:
    """Have each helper hashed before its constants are asked for, and constants ordered
    by the names of their modules, from now on."""
    from triton.runtime.jit import DependenciesFinder

    update = getattr(DependenciesFinder, "_update_hash", None)
    record = getattr(DependenciesFinder, "record_reference", None)
    if update is None or record is None:
        logger.warning(
            "Triton names kernels in a way that is not known here: a start may compile "
            "kernels that an earlier one has compiled"
        )
        return

    def update_hash(self: Any, func: Any) -> None:
        _ = func.cache_key  # which finds its constants
        # It may have been hashed before this function was here.
        func.used_global_vals = {
            (name, _place_of(found[1])): found
            for (name, _), found in func.used_global_vals.items()
        }
        update(self, func)

    def record_reference(
        self: Any, val: Any, var_dict: Any = None, name: Any = None
    ) -> None:
        record(self, val, var_dict, name)
        found = self.used_global_vals.pop((name, id(var_dict)), None)
        if found is not None:
            self.used_global_vals[name, _place_of(var_dict)] = found

    DependenciesFinder._update_hash = update_hash
    DependenciesFinder.record_reference = record_reference


def _place_of(variables: dict[str, Any]) -> str:
    """The module of variables; those of a closure have none."""
    return str(variables.get("__name__", id(variables)))
