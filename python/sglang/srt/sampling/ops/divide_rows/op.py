"""The op that divides logits by temperatures."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.utils.dispatch import Op


def divide_rows_ref(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return logits / temperatures[:, None], [R, V] float32.

    Args:
        logits: [R, V] float32, bfloat16 or float16; rows contiguous.
        temperatures: [R] float32.
    """
    # Divides in float32 whatever the dtype, without a copy in it.
    return logits / temperatures[:, None]


divide_rows = Op(
    reference=divide_rows_ref,
    triton="sglang.srt.sampling.ops.divide_rows.triton:divide_rows",
)
