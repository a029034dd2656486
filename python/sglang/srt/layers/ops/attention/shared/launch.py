"""Compile-time parameters of a Triton launch, apart from the tensors it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.utils.triton_launch import compute_capability

_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """How a kernel is compiled.

    Fields:
        constants: values of its `constexpr` parameters, by name: numbers, and named
            tuples from `args`.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline over its loads.
        max_registers: of a thread; None leaves it to the compiler.
        launch_pdl: it may start while the preceding kernel runs (see
            `utils.triton_launch`).
    """

    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    launch_pdl: bool = False

    def options(self) -> dict[str, Any]:
        """Keyword arguments of a launch, including the constants."""
        options = {
            **self.constants,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        # The interpreter does not know the option.
        return {**options, "launch_pdl": True} if self.launch_pdl else options


def is_half_on_hopper(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device has the instructions of the kernels for Hopper, and the
    queries are in half precision. Only compute capability 9.0 has them."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and device.type == "cuda"
        and compute_capability(device.index or 0) == _HOPPER
    )
