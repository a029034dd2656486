"""Which Triton kernels this process loads, and a warning where one comes late.

Triton compiles a kernel, or reads it from its cache on disk, when a launch first asks
for one of its variants, and loads it with that launch, while everything else waits. A
variant is made of compile-time constants, dtypes, the alignment of addresses, and the
integers that are 1 or multiples of 16; so a launch with other numbers can be a new one.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)


class KernelLoads:
    """Counts the variants that are loaded from `start` until `stop`.

    Args:
        warns: say in the log which kernels come, each name once.

    Attributes:
        names: how many variants of each kernel.
    """

    def __init__(self, *, warns: bool = False) -> None:
        self.names: Counter[str] = Counter()
        self._warns = warns

    @property
    def total(self) -> int:
        """Variants so far."""
        return self.names.total()

    def start(self) -> None:
        """Count from now on, beside whoever else does."""
        # Where nothing runs on a GPU, nobody pays for the import.
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
