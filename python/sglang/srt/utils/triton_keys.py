"""Makes Triton's names of compiled kernels on disk the same in every process.

Triton 3.6 and 3.7 hash the constants read by a kernel's helper functions only if
another kernel has already hashed the helper, and order constants with the same name by
the addresses of their modules. So a name depends on the order of imports and first
launches, and a process may recompile a kernel that another one has left on disk.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


@functools.cache
def make_keys_stable() -> None:
    """Hash each helper before its constants are needed, and order constants by the
    names of their modules, from now on.
    """
    from triton.runtime.jit import DependenciesFinder

    update = getattr(DependenciesFinder, "_update_hash", None)
    record = getattr(DependenciesFinder, "record_reference", None)
    if update is None or record is None:
        logger.warning(
            "Unknown Triton version: kernel names may differ between starts, so a "
            "start may recompile kernels"
        )
        return

    def update_hash(self: Any, func: Any) -> None:
        # Asking for it finds the constants; it may have been hashed before.
        _ = func.cache_key
        func.used_global_vals = {
            (name, _module_name(found[1])): found
            for (name, _), found in func.used_global_vals.items()
        }
        update(self, func)

    def record_reference(
        self: Any, val: Any, var_dict: Any = None, name: Any = None
    ) -> None:
        record(self, val, var_dict, name)
        found = self.used_global_vals.pop((name, id(var_dict)), None)
        if found is not None:
            self.used_global_vals[name, _module_name(var_dict)] = found

    DependenciesFinder._update_hash = update_hash
    DependenciesFinder.record_reference = record_reference


def _module_name(variables: dict[str, Any]) -> str:
    """Return the module of variables; empty for a closure's variables."""
    return str(variables.get("__name__", id(variables)))
