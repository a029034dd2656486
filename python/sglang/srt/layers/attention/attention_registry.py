"""Attention backends by the name that `--attention-backend` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.paged_cpu_backend import (
    CpuNativeAttnBackend,
    PagedCpuAttnBackend,
    TorchNativeAttnBackend,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

_BACKENDS: dict[str, type[PagedCpuAttnBackend]] = {
    backend.name: backend for backend in (CpuNativeAttnBackend, TorchNativeAttnBackend)
}


def create_attention_backend(
    name: str, *, req_to_token_pool: ReqToTokenPool, kv_pool: KVCache
) -> AttentionBackend:
    """The backend `name`; argument checks have made sure that it exists."""
    return _BACKENDS[name](req_to_token_pool=req_to_token_pool, kv_pool=kv_pool)
