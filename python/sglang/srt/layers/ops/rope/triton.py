"""Triton kernel of per-head norm, rotary embedding and the write into the KV pool.

A program handles a few heads of one token, of q or of k and v. `layers/ops/rope/op.py`
describes the function.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.layers.ops.stored_kv import most_stored, stored_value
from sglang.srt.mem_cache.kv_dtype import ONES, KVScales
from sglang.srt.utils.triton_launch import (
    let_next_start,
    supports_dependent_launch,
    wait_for_inputs,
)

_MANY_TOKENS = 128


class Heads(NamedTuple):
    """Constants that the kernel is compiled for; its argument HEADS.

    Fields:
        q_heads, kv_heads: heads per token. dim: channels per head.
        half: half the rotated channels of a head.
        dim_block, half_block, rest_block: powers of two that hold a head, one half and
            the channels that are not rotated.
        block: heads per program.
        has_q_norm, has_k_norm: whether the heads are normalised.
        most: largest value that the cache stores, as in `stored_value`.
    """

    q_heads: int
    kv_heads: int
    dim: int
    dim_block: int
    half: int
    half_block: int
    rest_block: int
    block: int
    has_q_norm: bool
    has_k_norm: bool
    most: int = 0


@triton.jit
def _transform_heads(
    source,
    source_offset,
    target,
    target_offset,
    head_mask,
    norm_weight,
    eps,
    cos_sin,
    stored_scale,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IN_PLACE: tl.constexpr,
    MOST: tl.constexpr,
):
    """target = rope(norm(source)) for the heads at the offsets, both [HEADS.block, 1].

    IN_PLACE: the source is overwritten with the result as well. `stored_scale` and
    MOST: as in `stored_value`. A head is its two rotated halves and the rest, which is
    kept; each is one tile.
    """
    DIM: tl.constexpr = HEADS.dim
    HALF: tl.constexpr = HEADS.half
    pair = tl.arange(0, HEADS.half_block)[None, :]
    rest = 2 * HALF + tl.arange(0, HEADS.rest_block)[None, :]
    pair_mask = head_mask & (pair < HALF)
    rest_mask = head_mask & (rest < DIM)
    start = source + source_offset
    if HALF > 0:
        first = tl.load(start + pair, mask=pair_mask, other=0.0).to(tl.float32)
        second = tl.load(start + HALF + pair, mask=pair_mask, other=0.0).to(tl.float32)
    if 2 * HALF < DIM:
        kept = tl.load(start + rest, mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.zeros([source_offset.shape[0]], dtype=tl.float32)
        if HALF > 0:
            square += tl.sum(first * first + second * second, axis=1)
        if 2 * HALF < DIM:
            square += tl.sum(kept * kept, axis=1)
        scale = tl.rsqrt(square / DIM + eps)[:, None]
        # The rotation reads the norm's result rounded as it would be stored.
        dtype = source.dtype.element_ty
        if HALF > 0:
            w = tl.load(norm_weight + pair, mask=pair < HALF, other=0.0)
            first = (first * scale * w.to(tl.float32)).to(dtype).to(tl.float32)
            w = tl.load(norm_weight + HALF + pair, mask=pair < HALF, other=0.0)
            second = (second * scale * w.to(tl.float32)).to(dtype).to(tl.float32)
        if 2 * HALF < DIM:
            w = tl.load(norm_weight + rest, mask=rest < DIM, other=0.0)
            kept = (kept * scale * w.to(tl.float32)).to(dtype)
    end = target + target_offset
    if HALF > 0:
        cos = tl.load(cos_sin + pair, mask=pair < HALF, other=0.0)
        sin = tl.load(cos_sin + HALF + pair, mask=pair < HALF, other=0.0)
        turned = (first * cos - second * sin).to(source.dtype.element_ty)
        made = stored_value(turned, target, stored_scale, MOST)
        tl.store(end + pair, made, mask=pair_mask)
        if IN_PLACE:
            tl.store(start + pair, turned, mask=pair_mask)
        turned = (second * cos + first * sin).to(source.dtype.element_ty)
        made = stored_value(turned, target, stored_scale, MOST)
        tl.store(end + HALF + pair, made, mask=pair_mask)
        if IN_PLACE:
            tl.store(start + HALF + pair, turned, mask=pair_mask)
    if 2 * HALF < DIM:
        unturned = kept.to(source.dtype.element_ty)
        made = stored_value(unturned, target, stored_scale, MOST)
        tl.store(end + rest, made, mask=rest_mask)
        if IN_PLACE:
            tl.store(start + rest, unturned, mask=rest_mask)


@triton.jit
def rope_store_kv_kernel(
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
    q_stride,
    k_stride,
    v_stride,
    k_cache_stride,
    v_cache_stride,
    scales,
    HEADS: tl.constexpr,
    UPDATE_K: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    DIM: tl.constexpr = HEADS.dim
    HALF: tl.constexpr = HEADS.half
    Q_GROUPS: tl.constexpr = (HEADS.q_heads + HEADS.block - 1) // HEADS.block
    let_next_start(PDL)
    wait_for_inputs(PDL)
    cos_sin = cos_sin_cache
    if HALF > 0:
        cos_sin += tl.load(positions + token) * (2 * HALF)
    if group < Q_GROUPS:
        head = group * HEADS.block + tl.arange(0, HEADS.block)[:, None]
        offset = token * q_stride + head * DIM
        if HEADS.has_q_norm or HALF > 0:
            _transform_heads(
                q,
                offset,
                q,
                offset,
                head < HEADS.q_heads,
                q_norm_weight,
                eps,
                cos_sin,
                scales.k,
                HEADS,
                HEADS.has_q_norm,
                False,
                0,
            )
    else:
        slot = tl.load(out_cache_loc + token)
        first = (group - Q_GROUPS) * HEADS.block
        head = first + tl.arange(0, HEADS.block)[:, None]
        _transform_heads(
            k,
            token * k_stride + head * DIM,
            k_cache,
            slot * k_cache_stride + head * DIM,
            head < HEADS.kv_heads,
            k_norm_weight,
            eps,
            cos_sin,
            scales.k,
            HEADS,
            HEADS.has_k_norm,
            UPDATE_K,
            HEADS.most,
        )
        channel = tl.arange(0, HEADS.dim_block)[None, :]
        mask = (head < HEADS.kv_heads) & (channel < DIM)
        value = tl.load(v + token * v_stride + head * DIM + channel, mask=mask)
        target = v_cache + slot * v_cache_stride + head * DIM + channel
        tl.store(target, stored_value(value, v_cache, scales.v, HEADS.most), mask=mask)


class StoreLaunch(NamedTuple):
    """Heads and warps per program."""

    heads: int
    warps: int


def store_launch(tokens: int) -> StoreLaunch:
    """Return how to store `tokens` tokens; many fill the device with larger
    programs."""
    return StoreLaunch(16, 4) if tokens >= _MANY_TOKENS else StoreLaunch(4, 2)


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
    """`ops.rope.rope_store_kv` in one launch; k is unchanged unless `update_k`.

    Raises:
        ValueError: heads or channels of a tensor are not contiguous, or a cache has
            another dtype.
    """
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    if tokens == 0:
        return
    for name, part in (("q", q), ("k", k), ("v", v)):
        if part.stride(2) != 1 or (part.shape[1] > 1 and part.stride(1) != dim):
            raise ValueError(
                f"rope_store_kv: {name} has strides {part.stride()}; heads and "
                "channels must be contiguous"
            )
    half = 0 if cos_sin_cache is None else cos_sin_cache.shape[1] // 2
    heads, warps = store_launch(tokens)
    groups = triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads)
    pdl = supports_dependent_launch(q.device)
    # Absent tensors are replaced by any pointer of their dtype; it is never read.
    rope_store_kv_kernel[(tokens, groups)](
        q,
        k,
        v,
        positions,
        positions if cos_sin_cache is None else cos_sin_cache,
        k_cache,
        v_cache,
        out_cache_loc,
        q if q_norm_weight is None else q_norm_weight,
        q if k_norm_weight is None else k_norm_weight,
        eps,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        scales,
        HEADS=Heads(
            q_heads=q_heads,
            kv_heads=kv_heads,
            dim=dim,
            dim_block=triton.next_power_of_2(dim),
            half=half,
            half_block=triton.next_power_of_2(max(half, 1)),
            rest_block=triton.next_power_of_2(max(dim - 2 * half, 1)),
            block=heads,
            has_q_norm=q_norm_weight is not None,
            has_k_norm=k_norm_weight is not None,
            most=most_stored(k, k_cache),
        ),
        UPDATE_K=update_k,
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
