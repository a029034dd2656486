"""The op that makes probabilities of logits at a temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.sampling.ops.divide_rows.op import divide_rows
from sglang.srt.sampling.ops.row_ops import require_together
from sglang.srt.utils.dispatch import Op

LEAST_VOCAB = 16384
"""torch keeps shorter rows in shared memory or registers."""
EACH = 4
"""Ids that a thread of torch's takes at a time."""


def splits_vocab(vocab: int) -> bool:
    """Whether programs can share rows of so many ids, and get torch's sums."""
    return vocab >= LEAST_VOCAB and vocab % EACH == 0


def softmax_rows_ref(
    logits: Tensor,
    temperatures: Tensor,
    *,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the softmax of logits / temperatures[:, None], [R, V] float32.

    A row is NaN if its logits hold NaN or +inf, or are all -inf.

    Args:
        logits: [R, V] float32, bfloat16 or float16; rows contiguous.
        temperatures: [R] float32, above 0; with `rows` one for each of these.
        rows: [P] int64, the rows to take, each once; negative for none. None for all.
        out: the result; required with `rows`, and not written elsewhere.
    """
    if rows is None or out is None:
        require_together(rows, out)
        return torch.softmax(divide_rows(logits, temperatures), dim=-1)
    taken = rows >= 0
    at = rows[taken]
    out[at] = softmax_rows_ref(logits[at], temperatures[taken])
    return out


softmax_rows = Op(
    reference=softmax_rows_ref,
    triton="sglang.srt.sampling.ops.softmax_rows.triton:softmax_rows",
)
