"""The op that copies whole slots of a pool. Knows a tensor, but no allocator or
requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.utils.dispatch import Op


def copy_slots_ref(tensor: Tensor, *, dst: Tensor, src: Tensor) -> None:
    """tensor[dst] = tensor[src].

    Args:
        tensor: [slots, ...], each slot contiguous.
        dst, src: int64 [n] on the same device. A copy of a slot to itself is left out,
            and may repeat. Of the others `dst` is distinct, and no slot is in both, so
            copies can run in any order.

    Raises:
        ValueError: a slot is in both. Kernels, whose indices are on the device, do not
            look.
    """
    is_copy = dst != src
    dst, src = dst[is_copy], src[is_copy]
    is_both = torch.isin(dst, src)
    if is_both.any():
        raise ValueError(f"copy_slots: {dst[is_both].tolist()} are both dst and src")
    tensor.index_copy_(0, dst, tensor.index_select(0, src))


copy_slots = Op(
    reference=copy_slots_ref,
    triton="sglang.srt.mem_cache.ops.copy_slots.triton:copy_slots",
)
