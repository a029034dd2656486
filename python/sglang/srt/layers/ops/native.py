"""Native implementations of the ops of layers: allocate results and order arguments.

Each has the parameters of its torch reference and is imported at its first call, as the
kernels may not be installed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.layers.ops.attention import tree_positions
from sglang.srt.layers.ops.head_linear import PackedHeads, head_linear_ref
from sglang.srt.layers.ops.latent import check_latent_store
from sglang.srt.layers.ops.linear import PANEL, PackedWeight, linear_ref
from sglang_kernels import ops

FEW_ROWS = 4
"""Rows of half precision up to which torch's product is slower on most shapes. With AMX
it takes 0.1 ms for 1 row and for 16 of 1536 x 576, this one 38, 78 (4) and 283 us."""


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops.rmsnorm(x, weight, eps, out)
    return out


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
    ops.silu_and_mul(x, out)
    return out


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
    ops.gelu_and_mul(x, out)
    return out


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if not isinstance(weight, PackedWeight):
        return _plain_linear(x, weight, bias, out)
    if weight.panel != PANEL:
        return linear_ref(x, weight, bias, out=out)
    if x.dtype != torch.float32:
        wide = linear(x.float(), weight, None if bias is None else bias.float())
        return wide.to(x.dtype) if out is None else out.copy_(wide)
    if out is None:
        # Two dimensions are the hot case, and slicing a shape is slow.
        sizes = (x.shape[0],) if x.dim() == 2 else x.shape[:-1]
        out = x.new_empty(*sizes, weight.n)
    ops.packed_linear(x, weight.data, weight.n, bias, out)
    return out


def _plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS or x.dtype == torch.float32 or not weight.is_contiguous():
        return linear_ref(x, weight, bias, out=out)
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
    ops.plain_linear(x.reshape(rows, x.shape[-1]), weight, bias, out)
    return out


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
) -> None:
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
) -> None:
    check_latent_store(q_norm_weight, update_k)
    ops.latent_store(
        q, k, positions, cos_sin_cache, k_cache, out_cache_loc, k_norm_weight, eps
    )


def head_linear(
    x: Tensor, weight: Tensor | PackedHeads, *, out: Tensor | None = None
) -> Tensor:
    if not isinstance(weight, PackedHeads):
        return head_linear_ref(x, weight, out=out)
    if out is None:
        out = x.new_empty(*x.shape[:2], weight.n)
    ops.packed_head_linear(x, weight.data, weight.n, out)
    return out


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    row_index: Tensor | None,
    read_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor,
) -> None:
    if sinks is None and logit_cap == 0.0:
        # Every decode step does this in each layer: packing arguments would show.
        ops.decode_attention(
            q,
            k_cache,
            v_cache,
            page_table,
            row_index,
            read_lens,
            page_size,
            sm_scale,
            window,
            out,
        )
        return
    common = (q, k_cache, v_cache, page_table, row_index, read_lens)
    numbers = (page_size, sm_scale, window)
    ops.decode_attention_full(*common, *numbers, logit_cap, sinks, out)


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    row_index: Tensor | None,
    qo_indptr: Tensor,
    prefix_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    positions: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor,
) -> None:
    positions = tree_positions(window, tree_mask, positions)
    common = (q, k_cache, v_cache, page_table, row_index, qo_indptr, prefix_lens)
    numbers = (page_size, sm_scale, window)
    if sinks is None and logit_cap == 0.0 and positions is None:
        ops.extend_attention(*common, *numbers, tree_mask, out)
    else:
        rest = (logit_cap, sinks, tree_mask, positions, out)
        ops.extend_attention_full(*common, *numbers, *rest)
