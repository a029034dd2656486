"""The op that sums rows over the ranks through memory that their GPUs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from sglang.srt.utils.dispatch import Op

if TYPE_CHECKING:
    from sglang.srt.distributed.peer_memory import PeerMemory


def sum_rows_ref(x: Tensor, memory: PeerMemory) -> None:
    """x := its sum over the ranks, the same bits on all of them.

    All ranks must make the same calls with one `memory` in the same order, on one
    stream.

    Args:
        x: [..., W] floating point, contiguous; `memory.can_send` it.
    """
    dist.all_reduce(x)


sum_rows = Op(
    reference=sum_rows_ref, triton="sglang.srt.distributed.peer_triton:sum_rows"
)
