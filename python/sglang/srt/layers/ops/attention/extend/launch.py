"""Extend attention on CUDA: causal, sliding window or tree mask over paged KV.

Takes the arguments of `layers.ops.attention.op.extend_attention` and gives the same
results. Knows nothing of requests or layers; never waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sglang.srt.layers.ops.attention.extend.inputs import ExtendInputs
from sglang.srt.layers.ops.attention.extend.kernels import extend_kernel
from sglang.srt.layers.ops.attention.extend.table import (
    ExtendTile,
    choose_tile,
    extend_launch,
)
from sglang.srt.layers.ops.attention.extend_dense.launch import extend_dense, reads_new
from sglang.srt.layers.ops.attention.extend_hopper.launch import extend_hopper
from sglang.srt.layers.ops.attention.extend_split.launch import (
    ExtendWorkspace,
    extend_split,
    extend_splits,
)
from sglang.srt.layers.ops.attention.extend_tree_hopper.launch import (
    extend_tree_hopper,
    serves_tree,
)
from sglang.srt.layers.ops.attention.op import tree_positions
from sglang.srt.layers.ops.attention.shared.checks import check_inputs

if TYPE_CHECKING:
    from sglang.srt.layers.ops.attention.extend_hopper.plan import ExtendPlan


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
    workspace: ExtendWorkspace | None = None,
    plan: ExtendPlan | None = None,
) -> None:
    """Attend several new tokens per row. Their K and V are already in the pool.

    If k_new and v_new are given and `reads_new` allows it, only the prefix is read from
    the pool. With a workspace, the programs of a launch of short rows may share a row's
    elements. How many do depends only on shapes and `workspace.max_context`, so the
    launch can be captured in a CUDA graph.

    Args:
        q, k_cache, v_cache, page_table, row_index, qo_indptr, prefix_lens, page_size,
            sm_scale, window, logit_cap, sinks, tree_mask, positions, k_new, v_new,
            out: as in `layers.ops.attention.op.extend_attention`; page_size a
            power of two, k_new and v_new aligned to 16 bytes.
        workspace: from `extend_workspace` for this head size.
        plan: plan of this forward, with k_new and v_new unless it has the slots of the
            new tokens; `extend_hopper` then runs.

    Raises:
        ValueError: a plan with a window, a cap or a tree mask, a window and a tree mask
            without positions, sm_scale <= 0, or shapes that do not fit.
    """
    if sm_scale <= 0:
        raise ValueError(f"extend_attention: sm_scale={sm_scale} must be positive")
    check_inputs(q, k_cache, v_cache, out, page_size=page_size, sinks=sinks)
    inputs = ExtendInputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        row_index=row_index,
        qo_indptr=qo_indptr,
        prefix_lens=prefix_lens,
        page_size=page_size,
        sm_scale=sm_scale,
        window=window,
        logit_cap=logit_cap,
        sinks=sinks,
        tree_mask=tree_mask,
        positions=tree_positions(window, tree_mask, positions),
        out=out,
    )
    shape = inputs.shape()
    if shape.tokens == 0 or shape.rows == 0:
        return
    if plan is not None:
        extend_hopper(inputs, plan, k_new=k_new, v_new=v_new)
        return
    if (
        k_new is not None
        and v_new is not None
        and reads_new(
            tokens=shape.tokens,
            rows=shape.rows,
            head_dim=shape.head_dim,
            dtype=q.dtype,
            has_tree=tree_mask is not None,
        )
    ):
        extend_dense(inputs, k_new, v_new)
        return
    if serves_tree(inputs):
        extend_tree_hopper(inputs)
        return
    tile = choose_tile(shape, itemsize=q.element_size())
    if workspace is not None and tile.programs > 0:
        splits = extend_splits(tile, shape, workspace)
        extend_split(inputs, tile=tile, splits=splits, workspace=workspace)
    else:
        _extend_unsplit(inputs, tile)


def _extend_unsplit(inputs: ExtendInputs, tile: ExtendTile) -> None:
    """One program per tile of queries."""
    shape = inputs.shape()
    launch = extend_launch(tile, shape, page_size=inputs.page_size)
    heads = launch.constants["TILE"].heads
    tiles = shape.tokens // (tile.block_m // heads) + shape.rows
    extend_kernel[(tiles * (shape.q_heads // heads),)](
        *inputs.tensor_args(),
        *inputs.tree_args(),
        shape.rows,
        tiles,
        *inputs.softmax_args(),
        **launch.options(),
    )
