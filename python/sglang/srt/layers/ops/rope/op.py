"""Rotary embedding, optional per-head norm of q and k, and the write into the KV pool.

Knows slots; knows nothing of pages, requests or layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.layers.ops.norm.op import rmsnorm_ref
from sglang.srt.mem_cache.kv_dtype import ONES, KVScales, to_stored
from sglang.srt.utils.dispatch import Op


def rope_store_kv_ref(
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
    """q = rope(norm(q)); k_cache[loc] = rope(norm(k)); v_cache[loc] = v.

    The rotation is half-split (neox): channel i < rot / 2 is paired with channel
    i + rot / 2, and channels from `rot` on are kept. q is changed in place. Without
    `update_k`, k may also change and must not be read afterwards. If `out_cache_loc`
    names a slot several times (padding writes scratch slot 0), the slot ends up with
    any of the rows, or a mixture of them.

    Args:
        q: [T, Hq, D]; float32, bfloat16 or float16. q, k and v may be views into one
            [T, (Hq + 2 * Hkv) * D] tensor; heads and channels are contiguous.
        k, v: [T, Hkv, D], the dtype of q.
        positions: [T] int64, rows of `cos_sin_cache`.
        cos_sin_cache: [max_position, rot] float32; a row has rot / 2 cosines, then
            rot / 2 sines; rot is even and at most D. None for no rotation.
        k_cache, v_cache: [slots, Hkv, D], the dtype of q or of 8 bits; written at
            `out_cache_loc`.
        out_cache_loc: [T] int64, slots.
        q_norm_weight, k_norm_weight: [D], the dtype of q, or None for no norm.
        eps: eps of the norms.
        update_k: also set k to rope(norm(k)). Slots must then be distinct, except for
            rows of k that are never read.
        scales: what k and v are divided by if the caches have 8 bits (`to_stored`), as
            they would be stored otherwise.
    """
    given_k = k
    if q_norm_weight is not None:
        q.copy_(rmsnorm_ref(q, q_norm_weight, eps))
    if k_norm_weight is not None:
        k = rmsnorm_ref(k, k_norm_weight, eps)
    if cos_sin_cache is not None:
        rows = cos_sin_cache[positions].unsqueeze(1)
        q.copy_(rotate(q, rows))
        k = rotate(k, rows)
    k_cache[out_cache_loc] = to_stored(k, k_cache.dtype, scales.k)
    if update_k:
        given_k.copy_(k)
    v_cache[out_cache_loc] = to_stored(v, v_cache.dtype, scales.v)


rope_store_kv = Op(
    reference=rope_store_kv_ref,
    native="sglang.srt.layers.ops.rope.native:rope_store_kv",
    triton="sglang.srt.layers.ops.rope.triton:rope_store_kv",
)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] by cos_sin [T, 1, rot]; return a new tensor of x's dtype."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin.split(half, dim=-1)
    first = x[..., :half].float()
    second = x[..., half : 2 * half].float()
    rotated = torch.cat(
        (first * cos - second * sin, second * cos + first * sin), dim=-1
    )
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)
