"""Triton kernel of the norm of a stream to which a sum over the ranks is added.

One launch instead of two, and the sum is never written. Described in
`layers/ops/norm/op.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.distributed.peer_memory import PROGRAMS, PeerMemory
from sglang.srt.distributed.peer_triton import exchange, peer_arguments, row_sum
from sglang.srt.layers.ops.norm.triton import normed
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def sum_add_rmsnorm_kernel(
    x,
    residual,
    inner,
    weight,
    eps,
    rows,
    addresses,
    counts,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    channel = tl.arange(0, SIZES.block)
    mask = channel < SIZES.width
    let_next_start(PDL)
    scale = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    if inner is not None:
        inner_scale = tl.load(inner + channel, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    turn = exchange(x, rows, addresses, counts, SIZES)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * SIZES.width + channel
        before = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        added = row_sum(x, row, turn, addresses, SIZES).to(tl.float32)
        if inner is not None:
            added = normed(added, inner_scale, eps, SIZES.width)
            added = added.to(x.dtype.element_ty).to(tl.float32)
        stored = (added + before).to(residual.dtype.element_ty)
        tl.store(residual + at, stored, mask=mask)
        result = normed(stored.to(tl.float32), scale, eps, SIZES.width)
        tl.store(x + at, result.to(x.dtype.element_ty), mask=mask)


def sum_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    inner: Tensor | None,
    weight: Tensor,
    eps: float,
    memory: PeerMemory,
) -> None:
    """`ops.norm.sum_add_rmsnorm` in one launch."""
    width = x.shape[-1]
    rows = x.numel() // width
    sum_add_rmsnorm_kernel[(min(rows, PROGRAMS),)](
        x, residual, inner, weight, eps, rows, **peer_arguments(memory, width, x)
    )
