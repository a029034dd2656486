"""Native form of rotation and store into the KV pool."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.mem_cache.kv_dtype import ONES, KVScales
from sglang_kernels import ops


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    update_k: bool = False,
    scales: KVScales = ONES,
) -> None:
    if k_cache.dtype != q.dtype:
        raise ValueError(
            f"rope_store_kv: q is {q.dtype}, the cache {k_cache.dtype}; the native "
            "kernels store one dtype"
        )
    ops.rope_store_kv(
        q,
        k,
        v,
        positions,
        cos_sin_cache,
        k_cache,
        v_cache,
        out_cache_loc,
        q_norm_weight,
        k_norm_weight,
        eps,
    )
    if update_k:
        k.copy_(k_cache[out_cache_loc])
