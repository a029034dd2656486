"""The op that draws a token per row from weights."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.sampling.ops import row_ops
from sglang.srt.sampling.ops.noise import uniform
from sglang.srt.utils.dispatch import Op


def draw_ref(weights: Tensor, *, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return [R] int64: the first id whose cumulative weight exceeds
    `noise.uniform(seeds, positions)` times the row's total, without waiting for the
    device.

    Never an id of weight 0, unless the row holds NaN or only zeros; then some id.

    Args:
        weights: [R, V] float32, contiguous, at least 0, not necessarily normalised.
        seeds, positions: [R] int64.
    """
    return row_ops.inverse_cdf(weights, uniform(seeds, positions))


draw = Op(reference=draw_ref, triton="sglang.srt.sampling.ops.draw.triton:draw")
