"""Names that Triton gives to compiled kernels on disk, the same in every process.

Triton 3.6 and 3.7 hash the constants that a kernel's helper functions read only where
some other kernel had the helper hashed before, so that the name depends on the order
of the first launches: a process may compile again what another one has left.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def make_keys_stable() -> None:
    """Have each helper hashed before its constants are asked for, from now on."""
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash

    def update_hash(self: Any, func: Any) -> None:
        _ = func.cache_key  # which finds its constants
        update(self, func)

    DependenciesFinder._update_hash = update_hash
