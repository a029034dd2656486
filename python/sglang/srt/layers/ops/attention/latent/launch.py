"""Attention over latents on CUDA, decode and extend.

Takes the arguments of `decode_attention` and `extend_attention` in
`layers.ops.attention.op` and gives the same results, for one KV head whose values are
the first channels of its keys. Knows nothing of requests or layers; never waits for the
device.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sglang.srt.layers.ops.attention.extend.table import searched_rows
from sglang.srt.layers.ops.attention.extend_split.kernels import extend_combine_kernel
from sglang.srt.layers.ops.attention.extend_split.launch import (
    ExtendWorkspace,
    split_combine_launch,
)
from sglang.srt.layers.ops.attention.latent.kernels import latent_kernel
from sglang.srt.layers.ops.attention.shared.args import (
    Lens,
    Partials,
    padded_head,
    pages_args,
    tokens_args,
)
from sglang.srt.layers.ops.attention.shared.checks import check_dtypes, check_page_size
from sglang.srt.layers.ops.attention.shared.launch import KernelLaunch

# Programs wanted in flight, two per multiprocessor.
_PROGRAMS = 256
_MAX_SPLITS = 64
_MIN_ELEMENTS_PER_SPLIT = 64
_MAX_HEADS = 64


class LatentShape(NamedTuple):
    """Sizes of a launch: query heads, channels of the latent and of the rotated key,
    the powers of two that hold them, and elements of a page."""

    q_heads: int
    rank: int
    rope: int
    page_size: int
    block_rank: int
    block_rope: int


class LatentTile(NamedTuple):
    """Tile of the kernel: block_m // heads tokens times `heads` query heads, block_n KV
    elements, masked_n where some query must not attend some, and the pipeline depth
    over the others."""

    heads: int
    block_m: int
    block_n: int
    masked_n: int
    stages: int


@functools.cache
def latent_launch(
    *,
    q_heads: int,
    rank: int,
    rope: int,
    page_size: int,
    rows: int,
    itemsize: int,
    is_decode: bool,
) -> KernelLaunch:
    """Return compile-time parameters of the kernel, chosen from shapes alone."""
    is_wide = itemsize > 2
    most = 16 if is_wide else _MAX_HEADS
    heads = max(h for h in range(1, most + 1) if q_heads % h == 0)
    block_m = most
    if is_decode:
        block_m = max(int(triton.next_power_of_2(heads)), 16)
    stages = 1 if is_wide else 2
    return KernelLaunch(
        constants={
            "LATENT": LatentShape(
                q_heads=q_heads,
                rank=rank,
                rope=rope,
                page_size=page_size,
                block_rank=padded_head(rank),
                block_rope=padded_head(rope),
            ),
            "TILE": LatentTile(
                heads=heads,
                block_m=block_m,
                block_n=16 if is_wide else 32,
                masked_n=16,
                stages=stages,
            ),
            "BLOCK_R": searched_rows(rows),
        },
        num_warps=8,
        num_stages=stages,
    )


def latent_splits(
    *, programs: int, tokens: int, q_heads: int, workspace: ExtendWorkspace
) -> int:
    """Return the splits of a row's KV elements, from shapes alone.

    Args:
        programs: programs of a launch with one split.
    """
    return max(
        min(
            _PROGRAMS // programs,
            workspace.max_context // _MIN_ELEMENTS_PER_SPLIT,
            workspace.lse.numel() // (tokens * q_heads),
            _MAX_SPLITS,
        ),
        1,
    )


def latent_decode_attention(
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
    workspace: ExtendWorkspace,
) -> None:
    """`ops.attention.decode_attention` over latents.

    The launch depends only on shapes and `workspace.max_context`, so it can be captured
    in a CUDA graph.

    Args:
        workspace: from `extend_workspace` for the channels of a value.

    Raises:
        ValueError: shapes that do not fit, or a window, a cap or sinks.
    """
    check_softmax(window, logit_cap, sinks)
    _attend(
        q,
        k_cache,
        v_cache,
        page_table=page_table,
        row_index=row_index,
        lens=Lens(None, read_lens),
        page_size=page_size,
        sm_scale=sm_scale,
        tree_mask=None,
        out=out,
        workspace=workspace,
    )


def latent_extend_attention(
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
    out: Tensor,
    workspace: ExtendWorkspace,
) -> None:
    """`ops.attention.extend_attention` over latents, which are read from the pool.

    Args:
        positions: ignored.
        workspace: as in `latent_decode_attention`.

    Raises:
        ValueError: as `latent_decode_attention`.
    """
    check_softmax(window, logit_cap, sinks)
    _attend(
        q,
        k_cache,
        v_cache,
        page_table=page_table,
        row_index=row_index,
        lens=Lens(qo_indptr, prefix_lens),
        page_size=page_size,
        sm_scale=sm_scale,
        tree_mask=tree_mask,
        out=out,
        workspace=workspace,
    )


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    row_index: Tensor | None,
    lens: Lens,
    page_size: int,
    sm_scale: float,
    tree_mask: Tensor | None,
    out: Tensor,
    workspace: ExtendWorkspace,
) -> None:
    _check(q, k_cache, v_cache, out, page_size)
    tokens, q_heads, width = q.shape
    rows, rank = lens.prefix_lens.shape[0], out.shape[2]
    if tokens == 0 or rows == 0:
        return
    launch = latent_launch(
        q_heads=q_heads,
        rank=rank,
        rope=width - rank,
        page_size=page_size,
        rows=rows,
        itemsize=q.element_size(),
        is_decode=lens.qo_indptr is None,
    )
    tile: LatentTile = launch.constants["TILE"]
    tiles = rows
    if lens.qo_indptr is not None:
        tiles += tokens // (tile.block_m // tile.heads)
    programs = tiles * (q_heads // tile.heads)
    splits = latent_splits(
        programs=programs, tokens=tokens, q_heads=q_heads, workspace=workspace
    )
    partials, outputs = Partials(workspace.partial, workspace.lse), tokens_args(out)
    latent_kernel[(programs, splits)](
        tokens_args(q),
        outputs,
        k_cache,
        k_cache.stride(0),
        pages_args(page_table, row_index),
        lens,
        None if tree_mask is None else tree_mask.view(torch.uint8),
        partials,
        rows,
        splits,
        sm_scale * math.log2(math.e),
        **launch.options(),
    )
    if splits == 1:
        return
    combine = split_combine_launch(q_heads=q_heads, head_dim=rank, splits=splits)
    extend_combine_kernel[(-(-tokens * q_heads // combine.constants["BLOCK_P"]),)](
        partials, lens.qo_indptr, None, outputs, rows, splits, **combine.options()
    )


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, page_size: int
) -> None:
    """Reject what the kernel cannot address.

    Raises:
        ValueError: naming the argument, its value and what is expected.
    """
    tokens, q_heads, width = q.shape
    check_page_size(page_size)
    is_view = v_cache.data_ptr() == k_cache.data_ptr()
    is_view &= v_cache.stride() == k_cache.stride() and v_cache.shape[2] < width
    if not is_view or k_cache.shape[1:] != (1, width) or k_cache.stride(2) != 1:
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}: pass "
            f"latents [slots, 1, {width}] and their first channels"
        )
    for name, tensor, size in (("q", q, width), ("out", out, v_cache.shape[2])):
        is_whole = tensor.stride(2) == 1 and (q_heads == 1 or tensor.stride(1) == size)
        if tensor.shape != (tokens, q_heads, size) or not is_whole:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}: pass [{tokens}, {q_heads}, {size}] with "
                "contiguous heads and channels"
            )
    check_dtypes(q, k_cache, v_cache, out)


def check_softmax(window: int, logit_cap: float, sinks: Tensor | None) -> None:
    """Raises:
    ValueError: an option that no latent kernel supports.
    """
    if window > 0 or logit_cap > 0 or sinks is not None:
        raise ValueError(
            f"window={window}, logit_cap={logit_cap}, sinks={sinks is not None}: "
            "attention over latents on CUDA has none of them"
        )
