"""The op that chooses a token per row if no filter applies."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.sampling.ops import row_ops
from sglang.srt.sampling.ops.noise import uniform
from sglang.srt.utils.dispatch import Op


def choose_tokens_ref(
    logits: Tensor,
    *,
    temperatures: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    greedy_rows: Tensor | None = None,
) -> Tensor:
    """Choose one token id per row, [R] int64 on the device, without waiting for it.

    A greedy row takes the first id of the largest logit, NaN counting as the largest.
    Any other row takes the first id whose cumulative softmax weight exceeds
    `noise.uniform(seeds, positions)` times the total.

    Args:
        logits: [R, V] float32, bfloat16 or float16; rows contiguous.
        temperatures: [R] float32 divisors of drawn rows' logits, or None if these are
            already divided.
        seeds, positions: [R] int64, or None if all rows are greedy.
        greedy_rows: [R] bool; required with `seeds`.

    Raises:
        ValueError: seeds, positions and greedy_rows are not given together.
    """
    wide = logits.float()
    if seeds is None or positions is None or greedy_rows is None:
        row_ops.require_together(seeds, positions, greedy_rows)
        return row_ops.argmax_rows(wide)
    scaled = wide if temperatures is None else wide / temperatures[:, None]
    weights = torch.softmax(scaled, dim=-1)
    drawn = row_ops.inverse_cdf(weights, uniform(seeds, positions))
    if row_ops.on_host(logits) and not bool(greedy_rows.any()):
        return drawn
    return torch.where(greedy_rows, row_ops.argmax_rows(wide), drawn)


choose_tokens = Op(
    reference=choose_tokens_ref,
    triton="sglang.srt.sampling.ops.choose_tokens.triton:choose_tokens",
)
