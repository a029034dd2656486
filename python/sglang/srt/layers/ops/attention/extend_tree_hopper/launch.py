"""Extend attention under tree masks on Hopper: launcher of `extend_tree_hopper_kernel`.

K and V are fetched from the pool a block at a time, so pages must hold whole blocks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from sglang.srt.layers.ops.attention.extend_hopper.kernels import Softmax
from sglang.srt.layers.ops.attention.extend_hopper.launch import (
    descriptor,
    multiprocessors,
    rows_of_heads,
    serves,
)
from sglang.srt.layers.ops.attention.extend_tree_hopper.kernels import (
    extend_tree_hopper_kernel,
)
from sglang.srt.layers.ops.attention.shared.args import pages_args

if TYPE_CHECKING:
    from sglang.srt.layers.ops.attention.extend.inputs import ExtendInputs

BLOCK = 64
"""Queries of a tile, and KV elements of a block."""
# By head size: blocks of K, and of V, in shared memory.
STAGES = {64: 6, 128: 4}
# With fewer new tokens per request most of a tile would be padding.
MIN_TOKENS = BLOCK // 2 + 1
# With fewer requests times pairs of query heads most multiprocessors would idle.
MIN_WORK = 64


def serves_tree(inputs: ExtendInputs) -> bool:
    """Return whether `extend_tree_hopper` computes these inputs, from shapes alone."""
    mask = inputs.tree_mask
    if mask is None or inputs.window > 0 or inputs.logit_cap > 0:
        return False
    if inputs.k_cache.dtype != inputs.q.dtype:
        return False
    tokens, rows, q_heads, kv_heads, head_dim = inputs.shape()
    new = mask.shape[1]
    return (
        MIN_TOKENS <= new <= BLOCK
        and tokens == rows * new
        and inputs.page_size % BLOCK == 0
        and q_heads // kv_heads % 2 == 0
        and rows * q_heads // 2 >= MIN_WORK
        and _is_rows(inputs.k_cache)
        and _is_rows(inputs.v_cache)
        and serves(head_dim=head_dim, dtype=inputs.q.dtype, device=inputs.q.device)
    )


def _is_rows(cache: Tensor) -> bool:
    """Return whether a slot's heads and channels are contiguous and slots aligned."""
    _, heads, channels = cache.shape
    is_dense = cache.stride(1) == channels and cache.stride(2) == 1
    return is_dense and cache.stride(0) * cache.element_size() % 16 == 0


def extend_tree_hopper(inputs: ExtendInputs) -> None:
    """`extend_attention` with a tree mask, if `serves_tree` allows it.

    NaN in a token's K or V can reach all new tokens of the same request, but never
    another request.
    """
    q, out, mask = inputs.q, inputs.out, inputs.tree_mask
    assert mask is not None
    _, rows, q_heads, kv_heads, head_dim = inputs.shape()
    new = mask.shape[1]
    items = rows * q_heads // 2
    extend_tree_hopper_kernel[(min(items, multiprocessors(q.device.index or 0)),)](
        *(
            descriptor(rows_of_heads(tensor), BLOCK, head_dim)
            for tensor in (q, out, inputs.k_cache, inputs.v_cache)
        ),
        out,
        out.stride(0),
        pages_args(inputs.page_table, inputs.row_index),
        inputs.prefix_lens,
        inputs.tree_args()[0],
        Softmax(inputs.sinks, inputs.sm_scale * math.log2(math.e)),
        items,
        HEADS=q_heads,
        GROUP=q_heads // kv_heads,
        D=head_dim,
        NEW=new,
        PAGE=inputs.page_size,
        QUERIES=BLOCK,
        BLOCK=BLOCK,
        STAGES=STAGES[head_dim],
        num_warps=4,
        launch_pdl=True,
    )
