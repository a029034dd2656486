"""Extend attention on CUDA: causal, sliding window or tree mask over paged KV.

Same arguments and results as `sglang.srt.layers.ops.attention.extend_attention`. Knows
nothing of requests or layers; never waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sglang.srt.layers.attention.triton_ops.checks import check_inputs
from sglang.srt.layers.attention.triton_ops.extend_dense import (
    extend_dense,
    reads_new,
)
from sglang.srt.layers.attention.triton_ops.extend_kernels import extend_kernel
from sglang.srt.layers.attention.triton_ops.extend_split import (
    ExtendWorkspace,
    extend_split,
    extend_splits,
)
from sglang.srt.layers.attention.triton_ops.extend_table import (
    choose_tile,
    extend_launch,
)
from sglang.srt.layers.ops.attention import refuse_window_with_tree


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
    tree_mask: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor,
    workspace: ExtendWorkspace | None = None,
) -> None:
    """Attention of several new tokens per row, whose K and V are in the pool already.

    With k_new and v_new, and where `reads_new` says so, the pool is read for the prefix
    alone. With a workspace the programs of a launch of short rows may share the
    elements of a row; how many do depends on shapes and on `workspace.max_context`
    only, so that the launch can be captured in a CUDA graph.

    Args:
        q, k_cache, v_cache, page_table, row_index, qo_indptr, prefix_lens, page_size,
            sm_scale, window, tree_mask, k_new, v_new, out: as in
            `sglang.srt.layers.ops.attention.extend_attention`; page_size a power of
            two, k_new and v_new aligned to 16 bytes.
        workspace: from `extend_workspace` for this head size.

    Raises:
        ValueError: a window together with a tree mask, sm_scale <= 0, or shapes that
            do not fit.
    """
    if tree_mask is not None:
        refuse_window_with_tree(window)
    if sm_scale <= 0:
        raise ValueError(f"extend_attention: sm_scale={sm_scale} must be positive")
    check_inputs(q, k_cache, v_cache, out, page_size=page_size)
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    rows = prefix_lens.shape[0]
    if tokens == 0 or rows == 0:
        return
    if (
        k_new is not None
        and v_new is not None
        and reads_new(
            tokens=tokens,
            rows=rows,
            head_dim=head_dim,
            dtype=q.dtype,
            has_tree=tree_mask is not None,
        )
    ):
        extend_dense(
            q,
            k_cache,
            v_cache,
            k_new,
            v_new,
            page_table=page_table,
            row_index=row_index,
            qo_indptr=qo_indptr,
            prefix_lens=prefix_lens,
            page_size=page_size,
            sm_scale=sm_scale,
            window=window,
            out=out,
        )
        return
    shape = {"rows": rows, "q_heads": q_heads, "kv_heads": kv_heads}
    tile = choose_tile(
        **shape, tokens=tokens, head_dim=head_dim, itemsize=q.element_size()
    )
    if workspace is not None and tile.programs > 0:
        extend_split(
            q,
            k_cache,
            v_cache,
            page_table=page_table,
            row_index=row_index,
            qo_indptr=qo_indptr,
            prefix_lens=prefix_lens,
            page_size=page_size,
            sm_scale=sm_scale,
            window=window,
            tree_mask=tree_mask,
            out=out,
            tile=tile,
            splits=extend_splits(tile, **shape, tokens=tokens, workspace=workspace),
            workspace=workspace,
        )
        return
    launch = extend_launch(
        tile,
        **shape,
        head_dim=head_dim,
        page_size=page_size,
        has_row_index=row_index is not None,
        has_window=window > 0,
        has_tree=tree_mask is not None,
    )
    heads_per_tile = launch.constants["HEADS_PER_TILE"]
    tiles = tokens // (tile.block_m // heads_per_tile) + rows
    extend_kernel[(tiles * (q_heads // heads_per_tile),)](
        q,
        k_cache,
        v_cache,
        page_table,
        row_index,
        qo_indptr,
        prefix_lens,
        None if tree_mask is None else tree_mask.view(torch.uint8),
        out,
        rows,
        tiles,
        sm_scale * math.log2(math.e),
        window,
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        page_table.stride(0),
        page_table.stride(1),
        out.stride(0),
        **launch.options(),
    )
