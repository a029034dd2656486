"""Triton kernel of activation(x @ gate.T) * (x @ up.T) for one tall tile of rows.

With 65 to 128 rows, x is as large as the weights that a program reads, so half of what
the weight-streaming kernels fetch would be x again and again. Here one program keeps
twice the outputs, gate and up, and the copy engine fetches the tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.ops.activation.triton import activated
from sglang.srt.layers.ops.linear.triton_kernels import prefetch_items
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


@triton.jit(do_not_specialize=["rows"])
def gated_gemm_kernel(
    x_tiles,
    weight_tiles,
    weight,
    out,
    rows,
    outputs,
    out_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs [tile * BLOCK_N, + BLOCK_N) of up to BLOCK_M rows.

    The descriptors `x_tiles` of x [rows, K] and `weight_tiles` of the weight
    [2 * outputs, K] read zeros past the end. The last tile's gate may reach into up's
    rows; those outputs are not stored.
    """
    tile = tl.program_id(0)
    gate_row = tile * BLOCK_N
    up_row = outputs + gate_row
    let_next_start(PDL)
    if PDL:
        n = tl.minimum(gate_row + tl.arange(0, BLOCK_N), outputs - 1)
        gate = weight + n.to(tl.int64)[:, None] * K
        up = gate + outputs.to(tl.int64) * K
        for ahead in tl.static_range(PREFETCH):
            prefetch_items(gate, ahead * BLOCK_K, K, BLOCK_K)
            prefetch_items(up, ahead * BLOCK_K, K, BLOCK_K)
    wait_for_inputs(PDL)
    gate_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x_tile = x_tiles.load([0, k])
        gate_sum = tl.dot(x_tile, weight_tiles.load([gate_row, k]).T, gate_sum)
        up_sum = tl.dot(x_tile, weight_tiles.load([up_row, k]).T, up_sum)
    # The activation gets the product rounded as it would be stored.
    gate_value = gate_sum.to(out.dtype.element_ty).to(tl.float32)
    up_value = up_sum.to(out.dtype.element_ty).to(tl.float32)
    result = activated(gate_value, up_value, GELU)
    m = tl.arange(0, BLOCK_M)[:, None]
    n = gate_row + tl.arange(0, BLOCK_N)[None, :]
    tl.store(
        out + m * out_stride + n,
        result.to(out.dtype.element_ty),
        mask=(m < rows) & (n < outputs),
    )
