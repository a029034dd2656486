"""Extend attention on CUDA: causal, sliding window or tree mask over paged KV.

Same arguments and results as `sglang.srt.layers.ops.attention.extend_attention`. Knows
nothing of requests or layers; never waits for the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sglang.srt.layers.attention.triton_ops.checks import check_inputs
from sglang.srt.layers.attention.triton_ops.extend_dense import (
    extend_dense,
    reads_new,
)
from sglang.srt.layers.attention.triton_ops.extend_kernels import extend_kernel
from sglang.srt.layers.attention.triton_ops.launch import Launch

_SMALL_BATCH_ROWS = 16
# Elements of a tile where some query must not see some element: a short tile leaves
# registers to the main loop.
_MASKED_N = 32


class _Tile(NamedTuple):
    """Queries (tokens x heads of a group) and KV elements of a tile; how it runs."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    is_v_late: bool


# Per padded head size: (queries of a row on average, the best tile up to there), as
# measured with benchmark/kernels/bench_triton_attention.py --sweep.
_Tiles = dict[int, tuple[tuple[float, _Tile], ...]]
_HALF_TILES: _Tiles = {
    64: (
        (64, _Tile(64, 64, 4, 3, True)),
        (8192, _Tile(64, 32, 4, 3, True)),
        (math.inf, _Tile(64, 64, 4, 3, True)),
    ),
    128: (
        (64, _Tile(64, 128, 4, 2, True)),
        (8192, _Tile(64, 64, 4, 3, False)),
        (math.inf, _Tile(128, 128, 8, 3, False)),
    ),
    256: (
        (64, _Tile(64, 64, 8, 2, True)),
        (8192, _Tile(128, 32, 8, 2, True)),
        (math.inf, _Tile(128, 64, 8, 2, True)),
    ),
}
_FLOAT_TILES: _Tiles = {
    64: ((math.inf, _Tile(64, 64, 4, 3, True)),),
    128: ((math.inf, _Tile(64, 32, 4, 2, True)),),
    256: ((math.inf, _Tile(64, 16, 8, 2, True)),),
}


def _heads_per_tile(group: int) -> int:
    return group if group <= 64 else 1


def extend_launch(
    *,
    tokens: int,
    rows: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    page_size: int,
    has_row_index: bool,
    has_window: bool,
    has_tree: bool,
) -> Launch:
    """Compile-time parameters of the kernel, chosen from shapes alone."""
    group = q_heads // kv_heads
    heads_per_tile = _heads_per_tile(group)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    tiles = (_HALF_TILES if itemsize == 2 else _FLOAT_TILES)[max(block_d, 64)]
    queries = tokens * heads_per_tile / rows
    tile = next(tile for limit, tile in tiles if queries <= limit)
    return Launch(
        constants={
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "HEADS_PER_TILE": heads_per_tile,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": page_size,
            "HAS_ROW_INDEX": has_row_index,
            "HAS_WINDOW": has_window,
            "HAS_TREE": has_tree,
            "BLOCK_R": 16 if rows <= _SMALL_BATCH_ROWS else 256,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "MASKED_N": min(tile.block_n, _MASKED_N),
            "BLOCK_D": block_d,
            "STAGES": tile.stages,
            "IS_V_LATE": tile.is_v_late,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


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
) -> None:
    """Attention of several new tokens per row, whose K and V are in the pool already.

    With k_new and v_new, and where `reads_new` says so, the pool is read for the prefix
    alone.

    Args:
        q, k_cache, v_cache, page_table, row_index, qo_indptr, prefix_lens, page_size,
            sm_scale, window, tree_mask, k_new, v_new, out: as in
            `sglang.srt.layers.ops.attention.extend_attention`; page_size a power of
            two, k_new and v_new aligned to 16 bytes. Tokens past qo_indptr[R] are left
            alone.

    Raises:
        ValueError: a window together with a tree mask, sm_scale <= 0, or shapes that
            do not fit.
    """
    if tree_mask is not None and window > 0:
        raise ValueError(
            f"extend_attention: window={window} with a tree mask is not supported; "
            "pass window=-1 or no tree mask"
        )
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
    launch = extend_launch(
        tokens=tokens,
        rows=rows,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        itemsize=q.element_size(),
        page_size=page_size,
        has_row_index=row_index is not None,
        has_window=window > 0,
        has_tree=tree_mask is not None,
    )
    heads_per_tile = launch.constants["HEADS_PER_TILE"]
    tiles = tokens // (launch.constants["BLOCK_M"] // heads_per_tile) + rows
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
