"""Counts the Triton kernels this process loads, and warns about late ones.

When a launch first needs a variant of a kernel, Triton compiles it or reads it from its
disk cache, and loads it, while everything else waits. A variant is determined by
compile-time constants, dtypes, alignment of addresses, and which integers are 1 or
multiples of 16, so a launch with different numbers can need a new variant.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)


class KernelLoads:
    """Counts the variants loaded between `start` and `stop`.

    Args:
        warns: whether to log the name of each loaded kernel once.

    Attributes:
        names: number of variants of each kernel.
    """

    def __init__(self, *, warns: bool = False) -> None:
        self.names: Counter[str] = Counter()
        self._warns = warns

    @property
    def total(self) -> int:
        """Number of variants so far."""
        return self.names.total()

    def start(self) -> None:
        """Start counting, in addition to other counters."""
        # If nothing runs on a GPU, the import is avoided.
        import triton

        triton.knobs.runtime.kernel_load_end_hook.add(self._on_load)

    def stop(self) -> None:
        import triton

        triton.knobs.runtime.kernel_load_end_hook.remove(self._on_load)

    def _on_load(
        self, module: Any, function: Any, name: str, metadata: Any, digest: str
    ) -> None:
        self.names[name] += 1
        if self._warns and self.names[name] == 1:
            logger.warning(
                "%s: a variant of this kernel was compiled or loaded after the start, "
                "and all requests waited for it; please report what was asked of the "
                "engine. Further ones are counted in "
                "sglang:kernel_loads_after_ready_total",
                name,
            )
