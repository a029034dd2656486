"""Extend attention whose new K and V are read where the model left them.

Launcher of `extend_dense_kernel`, whose input is K of the new tokens as the pool holds
it: `rope_store_kv` leaves it so. `extend_attention` decides between this and the pool.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.srt.layers.attention.triton_ops.extend_dense_kernels import (
    extend_dense_kernel,
)
from sglang.srt.layers.attention.triton_ops.launch import Launch
from sglang.srt.layers.triton_ops.launch import supports_dependent_launch

_SMALL_BATCH_ROWS = 16
# Shorter rows spend their time on the prefix, which is in the pool.
_MIN_TOKENS_PER_ROW = 64
# Bytes that the copy engine aligns rows and tiles to.
_ALIGNMENT = 16


class _Tile(NamedTuple):
    """Queries and KV elements of a tile, of the new tokens and of the prefix; how it
    runs (see `extend_dense_kernel`).
    """

    block_m: int
    block_n: int
    gather_n: int
    warps: int
    stages: int


# Per padded head size, as measured with
# benchmark/kernels/bench_triton_attention.py --sweep. Two programs of 128 channels fill
# the shared memory of a multiprocessor. Wider heads are faster from the pool.
_TILES: dict[int, _Tile] = {
    64: _Tile(64, 128, 64, 4, 3),
    128: _Tile(64, 64, 64, 4, 3),
}
_MAX_HEAD_DIM = max(_TILES)
_MASKED_N = 16


def reads_new(
    *, tokens: int, rows: int, head_dim: int, dtype: torch.dtype, has_tree: bool
) -> bool:
    """Whether extend attention of this shape reads K and V of the new tokens from
    `k_new` and `v_new` when it gets them, and only the prefix from the pool.
    """
    is_long = tokens >= rows * _MIN_TOKENS_PER_ROW
    is_narrow = head_dim <= _MAX_HEAD_DIM and dtype.itemsize == 2
    return is_long and is_narrow and not has_tree


def dense_launch(
    *,
    rows: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    has_row_index: bool,
    has_window: bool,
    pdl: bool,
) -> Launch:
    """Compile-time parameters of the kernel, chosen from shapes alone.

    Args:
        pdl: the device has programmatic dependent launch.
    """
    group = q_heads // kv_heads
    block_d = max(triton.next_power_of_2(head_dim), 16)
    tile = _TILES[max(block_d, 64)]
    return Launch(
        constants={
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "HEADS_PER_TILE": group if group <= 64 else 1,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": page_size,
            "HAS_ROW_INDEX": has_row_index,
            "HAS_WINDOW": has_window,
            "ONE_ROW": rows == 1,
            "BLOCK_R": 16 if rows <= _SMALL_BATCH_ROWS else 256,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "GATHER_N": tile.gather_n,
            "MASKED_N": _MASKED_N,
            "BLOCK_D": block_d,
            "STAGES": tile.stages,
            "PDL": pdl,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl,
    )


def extend_dense(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    *,
    page_table: Tensor,
    row_index: Tensor | None,
    qo_indptr: Tensor,
    prefix_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int,
    out: Tensor,
) -> None:
    """`extend_attention` without a tree mask; its arguments are checked already.

    Raises:
        ValueError: k_new or v_new cannot be read by the copy engine.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    rows = prefix_lens.shape[0]
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        _check_new(name, new, (tokens, kv_heads, head_dim), q.dtype)
    launch = dense_launch(
        rows=rows,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        has_row_index=row_index is not None,
        has_window=window > 0,
        pdl=supports_dependent_launch(q.device),
    )
    constants = launch.constants
    heads_per_tile = constants["HEADS_PER_TILE"]
    tiles = tokens // (constants["BLOCK_M"] // heads_per_tile) + rows
    block = [constants["BLOCK_N"], constants["BLOCK_D"]]
    shape = [tokens, kv_heads * head_dim]
    extend_dense_kernel[(tiles * (q_heads // heads_per_tile),)](
        q,
        k_cache,
        v_cache,
        k_new,
        v_new,
        TensorDescriptor(k_new, shape, [k_new.stride(0), 1], block),
        TensorDescriptor(v_new, shape, [v_new.stride(0), 1], block),
        page_table,
        row_index,
        qo_indptr,
        prefix_lens,
        out,
        tokens,
        rows,
        tiles,
        sm_scale * math.log2(math.e),
        window,
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        k_new.stride(0),
        v_new.stride(0),
        page_table.stride(0),
        page_table.stride(1),
        out.stride(0),
        **launch.options(),
    )


def _check_new(
    name: str, new: Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    if new.shape != shape or new.dtype != dtype:
        raise ValueError(
            f"{name} is {tuple(new.shape)} of {new.dtype}: pass {shape} of {dtype}"
        )
    row_bytes = new.stride(0) * new.element_size()
    is_whole = new.stride(2) == 1 and (shape[1] == 1 or new.stride(1) == shape[2])
    if not is_whole or row_bytes % _ALIGNMENT or new.data_ptr() % _ALIGNMENT:
        raise ValueError(
            f"{name} has strides {new.stride()} at address {new.data_ptr()}: heads and "
            f"channels must be contiguous, rows aligned to {_ALIGNMENT} bytes"
        )
