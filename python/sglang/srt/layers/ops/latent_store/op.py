"""The write of latents into the KV pool: norm of the latent, rotation of q and k.

Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) keeps one vector per token
for all heads: a compressed latent and a rotated key. Knows slots; knows nothing of
pages, requests or layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.layers.ops.norm.op import rmsnorm_ref
from sglang.srt.layers.ops.rope.op import rotate
from sglang.srt.mem_cache.kv_dtype import ONES, KVScales, to_stored
from sglang.srt.utils.dispatch import Op


def latent_store_ref(
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
    """k_cache[loc] = [norm(latent) | rope(key)] for k = [latent | key]; q's end = rope.

    Arguments are those of `rope_store_kv`, but some must have a fixed value. The
    rotation is half-split. k is left unchanged. If `out_cache_loc` names a slot several
    times, the slot ends up with any of the rows, or a mixture of them.

    Args:
        q: [T, Hq, any + rope]; float32, bfloat16 or float16; its last `rope` channels
            are rotated in place. Heads and channels contiguous, any token stride.
        k: [T, 1, rank + rope], the dtype of q, any token stride.
        v: the first `rank` channels of k; not read.
        positions: [T] int64, rows of `cos_sin_cache`.
        cos_sin_cache: [max_position, rope] float32; a row has rope / 2 cosines, then
            rope / 2 sines.
        k_cache: [slots, 1, rank + rope], the dtype of q or of 8 bits; written at
            `out_cache_loc`.
        v_cache: the first `rank` channels of k_cache; written with it.
        out_cache_loc: [T] int64, slots.
        q_norm_weight: must be None.
        k_norm_weight: [rank], the dtype of q. eps: eps of the norm.
        update_k: must be False.
        scales: as in `rope_store_kv`; a latent has the scale of K.

    Raises:
        ValueError: an argument does not have its required value.
    """
    check_latent_store(q_norm_weight, update_k)
    rope = cos_sin_cache.shape[-1]
    rank = k.shape[-1] - rope
    rows = cos_sin_cache[positions].unsqueeze(1)
    q[..., -rope:] = rotate(q[..., -rope:], rows)
    normed = rmsnorm_ref(k[..., :rank], k_norm_weight, eps)
    made = torch.cat((normed, rotate(k[..., rank:], rows)), dim=-1)
    k_cache[out_cache_loc] = to_stored(made, k_cache.dtype, scales.k)


latent_store = Op(
    reference=latent_store_ref,
    native="sglang.srt.layers.ops.latent_store.native:latent_store",
    triton="sglang.srt.layers.ops.latent_store.triton:latent_store",
)


def check_latent_store(q_norm_weight: Tensor | None, update_k: bool) -> None:
    """Raises:
    ValueError: as `latent_store_ref`.
    """
    if q_norm_weight is not None or update_k:
        raise ValueError("latent_store: queries have no norm, and k is not updated")
