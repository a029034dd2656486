"""Triton kernel of the write of latents: norm, rotation of q and k, and the store.

A program handles one token's latent, or a few of its query heads.
`layers/ops/latent_store/op.py` describes the function.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.layers.ops.latent_store.op import check_latent_store
from sglang.srt.layers.ops.stored_kv import most_stored, stored_value
from sglang.srt.mem_cache.kv_dtype import ONES, KVScales
from sglang.srt.utils.triton_launch import (
    let_next_start,
    supports_dependent_launch,
    wait_for_inputs,
)

HEADS = 16
"""Query heads per program."""


class Latent(NamedTuple):
    """Constants that the kernel is compiled for; its argument LATENT.

    Fields:
        q_heads: query heads per token. q_plain: channels before a query's rotated ones.
        rank: channels of the latent. half: half of the rotated channels.
        rank_block, half_block: `rank` and `half` rounded up to powers of two.
        block: query heads per program.
    """

    q_heads: int
    q_plain: int
    rank: int
    half: int
    rank_block: int
    half_block: int
    block: int


@triton.jit
def _rotate_pairs(
    source,
    target,
    cos_sin,
    is_head,
    scale,
    HALF,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """target = rope(source): pointers [heads, 1] to the first rotated channel; stored
    by `scale` and MOST as in `stored_value`."""
    pair = tl.arange(0, BLOCK)[None, :]
    mask = is_head & (pair < HALF)
    first = tl.load(source + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(cos_sin + HALF + pair, mask=pair < HALF, other=0.0)
    dtype = source.dtype.element_ty
    turned = (first * cos - second * sin).to(dtype)
    tl.store(target + pair, stored_value(turned, target, scale, MOST), mask=mask)
    turned = (second * cos + first * sin).to(dtype)
    tl.store(target + HALF + pair, stored_value(turned, target, scale, MOST), mask=mask)


@triton.jit
def latent_store_kernel(
    q,
    k,
    positions,
    cos_sin_cache,
    k_cache,
    out_cache_loc,
    norm_weight,
    eps,
    q_stride,
    k_stride,
    cache_stride,
    scale,
    LATENT: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, blocks of query heads and one more, for the latent)."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    RANK: tl.constexpr = LATENT.rank
    HALF: tl.constexpr = LATENT.half
    Q_GROUPS: tl.constexpr = (LATENT.q_heads + LATENT.block - 1) // LATENT.block
    let_next_start(PDL)
    wait_for_inputs(PDL)
    cos_sin = cos_sin_cache + tl.load(positions + token) * (2 * HALF)
    if group < Q_GROUPS:
        head = group * LATENT.block + tl.arange(0, LATENT.block)[:, None]
        PLAIN: tl.constexpr = LATENT.q_plain
        at = q + token * q_stride + head * (PLAIN + 2 * HALF) + PLAIN
        is_head = head < LATENT.q_heads
        _rotate_pairs(at, at, cos_sin, is_head, scale, HALF, LATENT.half_block, 0)
    else:
        slot = tl.load(out_cache_loc + token)
        source, target = k + token * k_stride, k_cache + slot * cache_stride
        channel = tl.arange(0, LATENT.rank_block)
        mask = channel < RANK
        value = tl.load(source + channel, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, axis=0) / RANK + eps)
        weight = tl.load(norm_weight + channel, mask=mask, other=0.0).to(tl.float32)
        normed = (value * inverse * weight).to(k.dtype.element_ty)
        made = stored_value(normed, k_cache, scale, MOST)
        tl.store(target + channel, made, mask=mask)
        first = tl.zeros([1, 1], tl.int64) + RANK
        _rotate_pairs(
            source + first,
            target + first,
            cos_sin,
            first > 0,
            scale,
            HALF,
            LATENT.half_block,
            MOST,
        )


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
    """`ops.latent.latent_store` in one launch.

    Raises:
        ValueError: also where heads or channels of q are not contiguous.
    """
    check_latent_store(q_norm_weight, update_k)
    tokens, q_heads, width = q.shape
    if tokens == 0:
        return
    if q.stride(2) != 1 or (q_heads > 1 and q.stride(1) != width) or k.stride(2) != 1:
        raise ValueError(
            f"latent_store: q has strides {q.stride()}, k {k.stride()}; heads and "
            "channels must be contiguous"
        )
    pdl = supports_dependent_launch(q.device)
    latent_store_kernel[(tokens, triton.cdiv(q_heads, HEADS) + 1)](
        q,
        k,
        positions,
        cos_sin_cache,
        k_cache,
        out_cache_loc,
        k_norm_weight,
        eps,
        q.stride(0),
        k.stride(0),
        k_cache.stride(0),
        scales.k,
        LATENT=latent_sizes(q_heads, width, k.shape[2], cos_sin_cache.shape[1]),
        MOST=most_stored(k, k_cache),
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def latent_sizes(q_heads: int, q_width: int, width: int, rope: int) -> Latent:
    """Return the sizes for queries of `q_width` channels and latents of `width`, the
    last `rope` of which are rotated."""
    rank, half = width - rope, rope // 2
    return Latent(
        q_heads=q_heads,
        q_plain=q_width - rope,
        rank=rank,
        half=half,
        rank_block=triton.next_power_of_2(rank),
        half_block=triton.next_power_of_2(half),
        block=HEADS,
    )
