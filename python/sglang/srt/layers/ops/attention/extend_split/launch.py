"""Extend attention for short rows over long prefixes: programs share a row's elements.

Launcher of the split kernels and owner of their workspace's layout. `extend_attention`
chooses between this and one program per tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from sglang.srt.layers.ops.attention.extend.table import (
    ExtendTile,
    LaunchShape,
    extend_launch,
    heads_per_tile,
)
from sglang.srt.layers.ops.attention.extend_split.kernels import (
    extend_combine_kernel,
    extend_split_kernel,
)
from sglang.srt.layers.ops.attention.shared.args import Partials, padded_head
from sglang.srt.layers.ops.attention.shared.launch import KernelLaunch

if TYPE_CHECKING:
    from sglang.srt.layers.ops.attention.extend.inputs import ExtendInputs

_MAX_SPLITS = 64
_MIN_ELEMENTS_PER_SPLIT = 64
# Partial results of this size leave room for K and V in the L2 cache.
_WORKSPACE_BYTES = 32 << 20
# Partial results of a combine program: 32 registers of each thread.
_COMBINE_WARPS = 4
_COMBINE_ELEMENTS = 32 * 32 * _COMBINE_WARPS
# Partial results of one query that these warps hold; a latent has more.
_MAX_COMBINED = 4 * _COMBINE_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendWorkspace:
    """Scratch of extend launches. Launches on one stream share it.

    Fields:
        partial: [cells * head_dim] float32, partial results. Cells are (token, query
            head, split) of the launch; only the kernels read or write them.
        lse: [cells] float32, log2 of the partial softmax sums.
        max_context: most KV elements of a row; it bounds the splits of a launch.
    """

    partial: Tensor
    lse: Tensor
    max_context: int


def extend_workspace(
    *, head_dim: int, max_context: int, device: str | torch.device
) -> ExtendWorkspace:
    """Allocate scratch for launches of any rows and tokens with this head size.

    Launches that would need more take fewer splits. A row with more than `max_context`
    elements is still computed, but slower.
    """
    cells = _WORKSPACE_BYTES // (4 * head_dim)
    return ExtendWorkspace(
        partial=torch.empty(cells * head_dim, dtype=torch.float32, device=device),
        lse=torch.empty(cells, dtype=torch.float32, device=device),
        max_context=max_context,
    )


def extend_splits(
    tile: ExtendTile, shape: LaunchShape, workspace: ExtendWorkspace
) -> int:
    """Return the splits of a row's KV elements, from shapes alone.

    There are as many as it takes to reach `tile.programs`, if each has enough elements
    at `max_context` and all fit the workspace.
    """
    heads = heads_per_tile(shape.q_heads // shape.kv_heads)
    tiles_per_row = -(-shape.tokens // (shape.rows * (tile.block_m // heads)))
    programs = shape.rows * tiles_per_row * (shape.q_heads // heads)
    return max(
        min(
            tile.programs // programs,
            workspace.max_context // _MIN_ELEMENTS_PER_SPLIT,
            workspace.lse.numel() // (shape.tokens * shape.q_heads),
            _MAX_SPLITS,
        ),
        1,
    )


@functools.cache
def split_combine_launch(*, q_heads: int, head_dim: int, splits: int) -> KernelLaunch:
    """Compile-time parameters of the combine kernel after a split kernel."""
    block_d = padded_head(head_dim)
    block_s = int(triton.next_power_of_2(splits))
    return KernelLaunch(
        constants={
            "Q_HEADS": q_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_P": max(_COMBINE_ELEMENTS // (block_s * block_d), 1),
            "BLOCK_S": block_s,
            "BLOCK_D": block_d,
        },
        num_warps=_COMBINE_WARPS * max(block_s * block_d // _MAX_COMBINED, 1),
        num_stages=1,
    )


def extend_split(
    inputs: ExtendInputs,
    *,
    tile: ExtendTile,
    splits: int,
    workspace: ExtendWorkspace,
) -> None:
    """Run `extend_attention` with this tile.

    Args:
        splits: programs that share the KV elements of a tile of queries. The launch
            depends only on this and on shapes, so it can be captured in a graph.

    Raises:
        ValueError: the workspace does not hold this launch.
    """
    shape = inputs.shape()
    tokens, rows, q_heads, _, head_dim = shape
    cells = tokens * q_heads * splits
    if splits > 1 and (
        workspace.lse.numel() < cells or workspace.partial.numel() < cells * head_dim
    ):
        raise ValueError(
            f"extend_attention: the workspace holds {workspace.lse.numel()} cells, "
            f"{tokens} tokens x {q_heads} heads x {splits} splits need {cells}; pass "
            "fewer splits, or a workspace for this head size"
        )
    launch = extend_launch(tile, shape, page_size=inputs.page_size)
    heads = launch.constants["TILE"].heads
    tile_tokens = tile.block_m // heads
    if inputs.tree_mask is None:
        tree_tokens = 0
        tiles = tokens // tile_tokens + rows
    else:
        tree_tokens = inputs.tree_mask.shape[1]
        tiles = rows * -(-tree_tokens // tile_tokens)
    tensors = inputs.tensor_args()
    partials = Partials(workspace.partial, workspace.lse)
    extend_split_kernel[(tiles * (q_heads // heads), splits)](
        *tensors,
        *inputs.tree_args(),
        partials,
        rows,
        tree_tokens,
        *inputs.softmax_args(),
        **launch.options(),
    )
    if splits == 1:
        return
    combine = split_combine_launch(q_heads=q_heads, head_dim=head_dim, splits=splits)
    extend_combine_kernel[(-(-tokens * q_heads // combine.constants["BLOCK_P"]),)](
        partials,
        tensors.lens.qo_indptr,
        inputs.sinks,
        tensors.out,
        rows,
        splits,
        **combine.options(),
    )
