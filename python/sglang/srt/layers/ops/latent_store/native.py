"""Native form of the store of latents."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.layers.ops.latent_store.op import check_latent_store
from sglang.srt.mem_cache.kv_dtype import ONES, KVScales
from sglang_kernels import ops


def latent_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    q_norm_weight: None = None,
    k_norm_weight: Tensor,
    eps: float,
    update_k: bool = False,
    scales: KVScales = ONES,
) -> None:
    if k_cache.dtype != q.dtype:
        raise ValueError(
            f"latent_store: q is {q.dtype}, the cache {k_cache.dtype}; the native "
            "kernels store one dtype"
        )
    check_latent_store(q_norm_weight, update_k)
    ops.latent_store(
        q, k, positions, cos_sin_cache, k_cache, out_cache_loc, k_norm_weight, eps
    )
