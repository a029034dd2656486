"""Causal extend attention on Hopper: launcher of `extend_hopper_kernel`.

New K and V are read from the model's output. Prefixes are gathered from the pool first,
so that the copy engine can fetch whole blocks. K and V of 8 bits become half precision
on the way, those of new tokens, too.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang.srt.layers.ops.attention.extend_hopper.kernels import extend_hopper_kernel
from sglang.srt.layers.ops.attention.extend_hopper.plan import BLOCK, ExtendPlan
from sglang.srt.layers.ops.attention.shared.launch import is_half_on_hopper

if TYPE_CHECKING:
    from sglang.srt.layers.ops.attention.extend.inputs import ExtendInputs

# By head size: blocks of K, and of V, in shared memory.
STAGES = {64: 4, 128: 2}
# With fewer new tokens in a forward there are too few tiles of 128 queries.
MIN_TOKENS = 1024


def serves(*, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel computes heads of this size on this device."""
    return head_dim in STAGES and is_half_on_hopper(dtype, device)


def extend_hopper(
    inputs: ExtendInputs,
    plan: ExtendPlan,
    *,
    k_new: Tensor | None,
    v_new: Tensor | None,
) -> None:
    """`extend_attention` without a window, cap or tree mask, if `serves` allows it.

    NaN in a token's K or V can reach tokens of the same request in its tile of 128, but
    never another request.

    Args:
        plan: plan for the lengths of this forward.
        k_new, v_new: as in `extend_attention`, rows aligned to 16 bytes. Not read if
            the plan has slots of new tokens.

    Raises:
        ValueError: a window, a cap or a tree mask.
        RuntimeError: heads and channels of a tensor are not contiguous.
    """
    if inputs.window > 0 or inputs.logit_cap > 0 or inputs.tree_mask is not None:
        raise ValueError(
            f"window={inputs.window}, logit_cap={inputs.logit_cap}, tree_mask="
            f"{'none' if inputs.tree_mask is None else 'given'}: this kernel is causal "
            "without a cap; leave out the plan"
        )
    q, out = inputs.q, inputs.out
    tokens, q_heads, head_dim = q.shape
    kv_heads = inputs.k_cache.shape[1]
    caches = (inputs.k_cache, inputs.v_cache)
    if plan.new_slots is not None:
        new = [gather(cache, plan.new_slots[:tokens], q.dtype) for cache in caches]
    else:
        assert k_new is not None and v_new is not None
        new = [rows_of_heads(tensor[:tokens]) for tensor in (k_new, v_new)]
    prefix = new
    if plan.prefix_slots is not None:
        prefix = [gather(cache, plan.prefix_slots, q.dtype) for cache in caches]
    items = len(plan.tiles) * q_heads
    programs = min(items, multiprocessors(q.device.index or 0))
    extend_hopper_kernel[(programs,)](
        descriptor(rows_of_heads(q), BLOCK // 2, head_dim),
        descriptor(rows_of_heads(out), BLOCK // 2, head_dim),
        *(descriptor(rows, BLOCK, head_dim) for rows in (*new, *prefix)),
        out,
        out.stride(0),
        plan.tiles,
        inputs.sinks,
        items,
        inputs.sm_scale * math.log2(math.e),
        HEADS=q_heads,
        GROUP=q_heads // kv_heads,
        D=head_dim,
        BLOCK=BLOCK,
        STAGES=STAGES[head_dim],
        num_warps=4,
        launch_pdl=True,
    )


def gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return K or V of slots in `dtype`, as `rows_of_heads`."""
    if cache.dtype == dtype:
        return rows_of_heads(cache.index_select(0, slots))
    # torch does not index numbers of 8 bits on every device.
    codes = cache.view(torch.uint8).index_select(0, slots)
    return rows_of_heads(codes.view(cache.dtype).to(dtype))


def rows_of_heads(tensor: Tensor) -> Tensor:
    """View [rows, heads, channels] as [rows, heads * channels]."""
    rows, heads, channels = tensor.shape
    return tensor.view(rows, heads * channels)


def descriptor(rows: Tensor, block: int, channels: int) -> TensorDescriptor:
    """Describe `rows_of_heads` in tiles of `block` rows of one head."""
    layout = _layout(block, channels, rows.dtype)
    return TensorDescriptor(
        rows, list(rows.shape), list(rows.stride()), [block, channels], layout
    )


_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@functools.cache
def _layout(block: int, channels: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([block, channels], _ELEMENTS[dtype])


@functools.cache
def multiprocessors(index: int) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
