"""The op that moves slots of a KV pool. Knows tensors, but no allocator or requests."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.utils.dispatch import Op

MOVE_SIZES = (64, 512, 2048)
"""Numbers of moves the kernel is compiled for; few, so a warm-up can run them all."""


def move_kv_cache_ref(
    k_buffer: Tensor, v_buffer: Tensor, *, dst: Tensor, src: Tensor
) -> None:
    """buffer[:, dst] = buffer[:, src] for K and V, as if everything was read first.

    Args:
        k_buffer, v_buffer: [layers, slots, ...], alike in shape, dtype and strides;
            the elements of a slot contiguous.
        dst, src: int64 [n] on the same device; dst may repeat only with equal sources.
    """
    for buffer in map(as_movable, (k_buffer, v_buffer)):
        buffer.index_copy_(1, dst, buffer.index_select(1, src))


def as_movable(buffer: Tensor) -> Tensor:
    """View values of 8 bits as bytes, because not every operation knows their
    dtype."""
    return buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer


move_kv_cache = Op(
    reference=move_kv_cache_ref,
    triton="sglang.srt.mem_cache.ops.move_kv.triton:move_kv_cache",
)
