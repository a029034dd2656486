"""KV bytes of a model with latent attention: one vector per token and layer.

Its first channels are the compressed latent, which is key and value of every head. The
rest is a rotated key.
"""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.groups.kv_group import LATENT
from sglang.srt.mem_cache.kv_dtype import to_stored
from sglang.srt.mem_cache.memory_pool import (
    CanarySource,
    KVCache,
    zeros_for_kv,
)
from sglang.srt.mem_cache.ops.move_kv.op import move_kv_cache


class MLATokenToKVPool(KVCache):
    """Latents as one tensor, [layers, slots, rank + rope], zero at start.

    Every rank holds them whole.

    Args:
        kv_lora_rank: channels of the latent, including the values.
        rope_dim: channels of the rotated key.

    Attributes:
        kv_buffer: the tensor.
    """

    kind = LATENT
    values_in_keys = True

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        kv_lora_rank: int,
        rope_dim: int,
        device: str | torch.device,
    ) -> None:
        super().__init__(
            size=size,
            page_size=page_size,
            dtype=dtype,
            layer_num=layer_num,
            device=device,
        )
        self.kv_lora_rank, self.rope_dim = kv_lora_rank, rope_dim
        shape = (layer_num, size + page_size, kv_lora_rank + rope_dim)
        self.kv_buffer = zeros_for_kv(shape, dtype, self.device)
        keys = self.kv_buffer.unsqueeze(2).unbind(0)
        self._layers = [(k, k[..., :kv_lora_rank]) for k in keys]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K, [slots, 1, rank + rope], and V, its first `rank` channels."""
        return self._layers[layer_id]

    def set_kv_buffer(
        self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write k ([n, 1, rank + rope]) to slots; v is its first channels."""
        stored = to_stored(k, self.dtype, self.layer_scales(layer_id).k)
        self._layers[layer_id][0][slots] = stored

    def _move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        first, second = self.kv_buffer.chunk(2, dim=2)
        move_kv_cache(first, second, dst=dst, src=src)

    def canary_sources(self) -> tuple[CanarySource, ...]:
        buffer = self.kv_buffer
        item = buffer.element_size()
        return (
            CanarySource(
                name="k",
                buffer=buffer,
                layer_num=self.layer_num,
                bytes_per_slot=buffer.shape[2] * item,
                layer_stride_bytes=buffer.stride(0) * item,
                slot_stride_bytes=buffer.stride(1) * item,
            ),
        )


def latent_bytes_per_token(*, layer_num: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of one slot in all layers of an `MLATokenToKVPool` whose latents
    have `width` channels, including the rotated key."""
    return layer_num * width * dtype.itemsize
