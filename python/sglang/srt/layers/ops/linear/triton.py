"""Matrix product of few rows with a weight that is read once: choice, checks, launch.

`choose` says where this beats cuBLAS; `linear` and `linear_gated` ask it. Knows
bfloat16, float16 and quantised weights [N, K]; knows nothing of layers or sharding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.srt.layers.ops.activation.triton import IS_GELU
from sglang.srt.layers.ops.linear.op import (
    AnyWeight,
    PackedWeight,
    linear_add_ref,
    linear_gated_ref,
    linear_ref,
)
from sglang.srt.layers.ops.linear.quantized import (
    FORMATS,
    QuantizedPanels,
    QuantizedWeight,
)
from sglang.srt.layers.ops.linear.triton_gated import gated_gemm_kernel
from sglang.srt.layers.ops.linear.triton_kernels import (
    Product,
    gemm_kernel,
    gemv_kernel,
)
from sglang.srt.layers.ops.linear.triton_many import (
    multiply_many,
    rounds,
    stored_weight,
)
from sglang.srt.layers.ops.linear.triton_table import (
    MAX_EXACT_ROWS,
    MAX_GATED_ROWS,
    MAX_ROWS,
    MIN_STEP,
    GemmConfig,
    lookup,
    lookup_quantized,
)
from sglang.srt.utils.triton_launch import (
    Scratch,
    is_hopper_or_later,
    rows_for_copies,
    supports_dependent_launch,
)

# 16 splits of 64 rows of 65,536 outputs would not fit; the table stays far below that.
_SCRATCH = Scratch(partial_bytes=32 << 20, counters=16384)


def choose(
    x: Tensor, weight: Tensor | QuantizedWeight, *, gated: bool = False
) -> GemmConfig | None:
    """Choose the kernel for x [..., K] and weight [N, K], or None if cuBLAS is better.

    Also None for anything the kernels do not take: other dtypes, a weight that is not
    row-major, no rows or more than `MAX_ROWS` (`MAX_GATED_ROWS` if gated, on Hopper).
    """
    n, k = weight.shape
    rows = x.numel() // k if k else 0
    if isinstance(weight, QuantizedWeight):
        packed = FORMATS[weight.format].per_item
        if not 0 < rows <= MAX_ROWS or x.dtype == torch.float32:
            return None
        if rows > MAX_EXACT_ROWS and rounds(x.dtype, weight):
            return None
        group = 0 if weight.is_scaled_by_row else weight.group_columns
        if group % (MIN_STEP * packed):
            return None
        return lookup_quantized(rows=rows, n=n, k=k, group=group, packed=packed > 1)
    most = MAX_GATED_ROWS if gated and is_hopper_or_later(x.device) else MAX_ROWS
    if not 0 < rows <= most or x.dtype != weight.dtype:
        return None
    if x.dtype not in (torch.bfloat16, torch.float16):
        return None
    if weight.stride() != (k, 1) or k % 8 or weight.data_ptr() % 16:
        return None
    return lookup(rows=rows, n=n, k=k, gated=gated)


def linear(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`ops.linear.linear`: runs `gemm` where it is faster, else torch."""
    if not isinstance(weight, (PackedWeight, QuantizedPanels)):
        config = choose(x, weight)
        if config is not None:
            return gemm(x, weight, bias, config=config, out=out)
        if isinstance(weight, QuantizedWeight):
            return multiply_many(x, weight, bias, out=out)
    return linear_ref(x, weight, bias, out=out)


def linear_add(x: Tensor, weight: AnyWeight, residual: Tensor) -> Tensor:
    """`ops.linear.linear_add`: one launch where `gemm` is faster."""
    if not isinstance(weight, (PackedWeight, QuantizedPanels)):
        config = choose(x, weight)
        if config is not None:
            return gemm(x, weight, config=config, residual=residual, out=residual)
    return linear_add_ref(x, weight, residual)


def linear_gated(
    x: Tensor,
    weight: AnyWeight,
    activation: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`ops.linear.linear_gated`: one launch where that is faster."""
    if not isinstance(weight, (PackedWeight, QuantizedPanels)):
        config = choose(x, weight, gated=True)
        if config is not None:
            return gemm_gated(x, weight, activation, config=config, out=out)
    return linear_gated_ref(x, weight, activation, out=out)


def gemm(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    config: GemmConfig,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out = x @ weight.T + bias + residual.

    Args:
        x: [..., K] bfloat16 or float16, at most `MAX_ROWS` rows.
        weight: [N, K] of the same dtype, row-major, K a multiple of 8; or quantised.
        bias: [N], or None.
        config: from `choose`.
        residual: [..., N] or None; may be `out`. The product is rounded to the dtype
            before it is added, as with two kernels.
        out: [..., N] contiguous. Allocated if None.

    Returns:
        `out`. Sums are float32; the same inputs give the same bits in every run.

    Raises:
        ValueError: a shape does not fit, or there are too many rows.
    """
    n = weight.shape[0]
    return _launch(
        x, weight, bias, residual, out, outputs=n, activation=None, config=config
    )


def gemm_gated(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    activation: str,
    *,
    config: GemmConfig,
    out: Tensor | None = None,
) -> Tensor:
    """out = activation(x @ weight[:I].T) * (x @ weight[I:].T), the [gate | up] layout.

    Args:
        x: [..., K] bfloat16 or float16, at most `config.max_rows` rows.
        weight: [2 * I, K] of the same dtype, row-major, K a multiple of 8; or
            quantised.
        activation: a key of `ops.activation.GATED`.
        config: from `choose(..., gated=True)`.
        out: [..., I] contiguous. Allocated if None.

    Raises:
        ValueError: a shape does not fit, or there are too many rows.
    """
    n = weight.shape[0]
    if n % 2:
        raise ValueError(f"gemm_gated: weight has {n} rows, expected 2 * I")
    if config.is_tall:
        assert isinstance(weight, Tensor)
        return _launch_tall(x, weight, out, activation=activation, config=config)
    return _launch(
        x, weight, None, None, out, outputs=n // 2, activation=activation, config=config
    )


def _launch(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    *,
    outputs: int,
    activation: str | None,
    config: GemmConfig,
) -> Tensor:
    if config.is_tall:
        raise ValueError(f"gemm: {config} only works for gated products")
    k = weight.shape[1]
    if isinstance(weight, QuantizedWeight):
        if not weight.is_scaled_by_row and weight.group_columns % config.block_k:
            raise ValueError(
                f"gemm: steps of {config.block_k} columns cut groups of "
                f"{weight.group_columns} that share a scale"
            )
        x = weight.in_order(x)
    flat = _rows(x, weight, config)
    rows = flat.shape[0]
    if out is None:
        out = x.new_empty((*x.shape[:-1], outputs))
    out_rows = out.view(rows, outputs)
    residual_rows = None if residual is None else residual.view(rows, outputs)
    pdl = config.dependent and supports_dependent_launch(x.device)
    stored = stored_weight(weight)
    product = Product(
        k=k,
        block_m=1 if config.split_k == 0 else max(16, triton.next_power_of_2(rows)),
        block_n=config.block_n,
        block_k=config.block_k,
        gated=activation is not None,
        gelu=activation is not None and IS_GELU[activation],
        has_bias=bias is not None,
        has_residual=residual is not None,
        **stored.constants,
    )
    common: dict[str, Any] = {
        "PRODUCT": product,
        "PDL": pdl,
        "num_warps": config.warps,
        **({"launch_pdl": True} if pdl else {}),
    }
    # Absent tensors are replaced by any pointer of their dtype; it is never read.
    bias_arg = flat if bias is None else bias
    residual_arg = flat if residual_rows is None else residual_rows
    tiles = triton.cdiv(outputs * (2 if product.gated else 1), config.block_n)
    if config.split_k == 0:
        gemv_kernel[(tiles,)](
            flat,
            stored.codes,
            stored.scales,
            bias_arg,
            residual_arg,
            out_rows,
            outputs,
            **common,
        )
        return out
    split = min(config.split_k, triton.cdiv(k, config.block_k))
    partial, counters = _SCRATCH.get(
        x.device,
        partial_bytes=4 * tiles * split * product.block_m * config.block_n
        if split > 1
        else 0,
        counters=tiles if split > 1 else 0,
    )
    gemm_kernel[(tiles, split)](
        flat,
        stored.codes,
        stored.scales,
        stored.zeros,
        bias_arg,
        residual_arg,
        out_rows,
        partial.view(torch.float32),
        counters,
        rows,
        outputs,
        flat.stride(0),
        outputs if residual_rows is None else residual_rows.stride(0),
        out_rows.stride(0),
        SPLIT_K=split,
        STAGES=config.stages,
        PREFETCH=config.prefetch,
        **common,
    )
    return out


def _rows(x: Tensor, weight: Tensor | QuantizedWeight, config: GemmConfig) -> Tensor:
    """Return x as a matrix [rows, K] with contiguous rows."""
    k = weight.shape[1]
    dtype = x.dtype if isinstance(weight, QuantizedWeight) else weight.dtype
    if x.shape[-1] != k or x.dtype != dtype:
        raise ValueError(
            f"gemm: x is {x.dtype} {tuple(x.shape)}, weight {dtype} "
            f"{tuple(weight.shape)}; dtypes and the last dimensions must be equal"
        )
    rows = x.numel() // k
    if not 0 < rows <= config.max_rows:
        raise ValueError(f"gemm: {rows} rows are too many for {config}")
    flat = x.reshape(rows, k)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _launch_tall(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None,
    *,
    activation: str,
    config: GemmConfig,
) -> Tensor:
    outputs, k = weight.shape[0] // 2, weight.shape[1]
    flat = rows_for_copies(_rows(x, weight, config))
    if out is None:
        out = x.new_empty((*x.shape[:-1], outputs))
    out_rows = out.view(-1, outputs)
    pdl = config.dependent and supports_dependent_launch(x.device)
    gated_gemm_kernel[(triton.cdiv(outputs, config.block_n),)](
        TensorDescriptor.from_tensor(flat, [MAX_GATED_ROWS, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        weight,
        out_rows,
        flat.shape[0],
        outputs,
        out_rows.stride(0),
        K=k,
        BLOCK_M=MAX_GATED_ROWS,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        PREFETCH=config.prefetch,
        GELU=IS_GELU[activation],
        PDL=pdl,
        num_warps=config.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def gemm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """Torch oracle of `gemm`."""
    result = torch.matmul(x.float(), weight.float().t())
    if bias is not None:
        result = result + bias.float()
    result = result.to(x.dtype)
    return (
        result if residual is None else (result.float() + residual.float()).to(x.dtype)
    )
