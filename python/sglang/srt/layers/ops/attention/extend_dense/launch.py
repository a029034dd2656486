"""Extend attention that reads new K and V from the model's output.

Launcher of `extend_dense_kernel`. Its input k is the new tokens' K as the pool holds
it, because `rope_store_kv` left it so. `extend_attention` chooses between this and the
pool.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.srt.layers.ops.attention.extend.table import (
    LaunchShape,
    heads_per_tile,
    searched_rows,
)
from sglang.srt.layers.ops.attention.extend_dense.kernels import extend_dense_kernel
from sglang.srt.layers.ops.attention.shared.args import (
    DenseTile,
    HeadShape,
    NewKV,
    shape_args,
)
from sglang.srt.layers.ops.attention.shared.launch import KernelLaunch
from sglang.srt.utils.triton_launch import supports_dependent_launch

if TYPE_CHECKING:
    from sglang.srt.layers.ops.attention.extend.inputs import ExtendInputs

# Shorter rows spend their time on the prefix, which is in the pool anyway.
MIN_TOKENS_PER_ROW = 64
# Bytes that the copy engine aligns rows and tiles to.
_ALIGNMENT = 16


class TileChoice(NamedTuple):
    """Queries of a tile, KV elements of a tile of new tokens and of prefix, and how it
    runs."""

    block_m: int
    block_n: int
    gather_n: int
    warps: int
    stages: int


# By padded head size, measured with
# benchmark/kernels/bench_triton_attention.py --sweep. Two programs of 128 channels fill
# the shared memory of a multiprocessor. Wider heads are faster from the pool.
TILES: dict[int, TileChoice] = {
    64: TileChoice(64, 128, 64, 4, 3),
    128: TileChoice(64, 64, 64, 4, 3),
}
_MAX_HEAD_DIM = max(TILES)
_MASKED_N = 16


def reads_new(
    *, tokens: int, rows: int, head_dim: int, dtype: torch.dtype, has_tree: bool
) -> bool:
    """Return whether extend attention of this shape reads new K and V from `k_new` and
    `v_new`, if given, and only the prefix from the pool.
    """
    is_long = tokens >= rows * MIN_TOKENS_PER_ROW
    is_narrow = head_dim <= _MAX_HEAD_DIM and dtype.itemsize == 2
    return is_long and is_narrow and not has_tree


def dense_launch(shape: LaunchShape, *, page_size: int, pdl: bool) -> KernelLaunch:
    """Return compile-time parameters of the kernel, chosen from shapes alone.

    Args:
        pdl: the device has programmatic dependent launch.
    """
    kernel_shape = shape_args(shape.q_heads, shape.kv_heads, shape.head_dim, page_size)
    tile = TILES[max(kernel_shape.block_d, 64)]
    block_r, one_row = searched_rows(shape.rows), shape.rows == 1
    return _make_launch(tile, kernel_shape, block_r, one_row, pdl)


@functools.cache
def _make_launch(
    tile: TileChoice, shape: HeadShape, block_r: int, one_row: bool, pdl: bool
) -> KernelLaunch:
    return KernelLaunch(
        constants={
            "SHAPE": shape,
            "TILE": DenseTile(
                heads=heads_per_tile(shape.group),
                block_m=tile.block_m,
                block_n=tile.block_n,
                gather_n=tile.gather_n,
                masked_n=_MASKED_N,
                stages=tile.stages,
            ),
            "BLOCK_R": block_r,
            "ONE_ROW": one_row,
            "PDL": pdl,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl,
    )


def extend_dense(inputs: ExtendInputs, k_new: Tensor, v_new: Tensor) -> None:
    """`extend_attention` without a tree mask, if `reads_new` allows it.

    Raises:
        ValueError: k_new or v_new cannot be read by the copy engine.
    """
    shape = inputs.shape()
    tokens, rows, q_heads, kv_heads, head_dim = shape
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        _check_new(name, new, (tokens, kv_heads, head_dim), inputs.q.dtype)
    launch = dense_launch(
        shape,
        page_size=inputs.page_size,
        pdl=supports_dependent_launch(inputs.q.device),
    )
    tile: DenseTile = launch.constants["TILE"]
    tiles = tokens // (tile.block_m // tile.heads) + rows
    block = [tile.block_n, launch.constants["SHAPE"].block_d]
    k_stride, v_stride = k_new.stride(0), v_new.stride(0)
    size = [tokens, kv_heads * head_dim]
    extend_dense_kernel[(tiles * (q_heads // tile.heads),)](
        *inputs.tensor_args(),
        NewKV(k_new, v_new, k_stride, v_stride),
        TensorDescriptor(k_new, size, [k_stride, 1], block),
        TensorDescriptor(v_new, size, [v_stride, 1], block),
        tokens,
        rows,
        tiles,
        *inputs.softmax_args(),
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
