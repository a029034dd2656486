"""The filter of a short convolution, and what its operations require."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

WIDTHS = range(2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvFilter:
    """Depthwise filter of C channels.

    Fields:
        weight: [C, W], contiguous; W is 2, 3 or 4. The last column weighs the newest
            input.
        bias: [C], added to the sum, or None.
        silu: whether the result goes through SiLU.
    """

    weight: Tensor
    bias: Tensor | None
    silu: bool

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    def activate(self, sums: Tensor) -> Tensor:
        """Return float32 [..., C] sums with bias and SiLU."""
        if self.bias is not None:
            sums = sums + self.bias.float()
        return functional.silu(sums) if self.silu else sums


def require_conv(x: Tensor, conv: ConvFilter, state: Tensor) -> None:
    """Raise ValueError if inputs, filter and state do not fit."""
    channels, width = conv.weight.shape
    if width not in WIDTHS:
        raise ValueError(
            f"short_conv: a filter of width {width}; widths {WIDTHS.start} to "
            f"{WIDTHS.stop - 1} are supported"
        )
    if x.shape[1:] != (channels,) or state.shape[1:] != (channels, width - 1):
        raise ValueError(
            f"short_conv: inputs {list(x.shape)} and state {list(state.shape)} do not "
            f"fit a filter of {channels} channels and width {width}"
        )
    require_state(x, state)


def require_state(x: Tensor, state: Tensor) -> None:
    """Raise ValueError unless the state keeps the bits of the inputs."""
    if x.dtype is not state.dtype:
        raise ValueError(
            f"short_conv: inputs are {x.dtype}, the state that keeps them {state.dtype}"
        )
