"""Triton form of the products of adapters: checks and launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from sglang.srt.forward.adapter_tiles import TILE, AdapterTiles
from sglang.srt.layers.ops.activation.triton import IS_GELU
from sglang.srt.layers.ops.lora.table import shape_of
from sglang.srt.layers.ops.lora.triton_kernels import (
    BLOCK_R,
    expand_gated_kernel,
    expand_kernel,
    shrink_kernel,
)
from sglang.srt.utils.triton_launch import launch_options

if TYPE_CHECKING:
    from sglang.srt.layers.ops.lora.op import AdapterStack

MAX_SHARDS = 3


def lora_shrink(x: Tensor, stack: AdapterStack, tiles: AdapterTiles) -> Tensor:
    """`ops.lora.lora_shrink`.

    Raises:
        ValueError: a shape or a dtype does not fit.
    """
    rank, shards, k = stack.rank, len(stack.sizes), stack.a.shape[2]
    count = len(tiles.words)
    fits = (
        x.dim() == 2
        and x.shape[1] == k
        and x.stride(1) == 1
        and stack.a.shape[1] == shards * rank
        and stack.a.stride()[1:] == (k, 1)
        and rank % BLOCK_R == 0
        and x.dtype == stack.a.dtype
    )
    if not fits:
        raise ValueError(f"lora_shrink: x {_form(x)}, {_form_of(stack)}")
    shape = shape_of(count)
    split = triton.cdiv(k, shape.slice_k)
    inner = torch.empty(
        split, count, TILE, shards * rank, dtype=torch.float32, device=x.device
    )
    if count:
        shrink_kernel[(count, shards * rank // BLOCK_R, split)](
            x,
            stack.a,
            stack.ranks,
            tiles.words,
            inner,
            x.stride(0),
            stack.a.stride(0),
            K=k,
            SHARDS=shards,
            SLICE_K=shape.slice_k,
            K_BLOCK=shape.block_k,
            num_warps=shape.shrink_warps,
            **_common(stack, x.device),
        )
    return inner


def lora_expand(
    y: Tensor,
    inner: Tensor | None,
    stack: AdapterStack,
    tiles: AdapterTiles,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`ops.lora.lora_expand`.

    Raises:
        ValueError: a shape or a dtype does not fit.
    """
    _check_expand("lora_expand", y, inner, stack, tiles)
    if out is None:
        out = y if inner is not None else y.new_empty(len(y), sum(stack.sizes))
    elif out.shape != (len(y), sum(stack.sizes)) or out.stride(1) != 1:
        raise ValueError(f"lora_expand: out {_form(out)}, {_form_of(stack)}")
    count, shape = len(tiles.words), shape_of(len(tiles.words))
    sizes = (*stack.sizes, 0, 0)
    blocks = sum(triton.cdiv(size, shape.block_n) for size in stack.sizes)
    if count:
        expand_kernel[(count, blocks)](
            *_expanded(y, inner, stack, tiles, out),
            y.stride(0),
            out.stride(0),
            stack.b.stride(0),
            N0=sizes[0],
            N1=sizes[1],
            N2=sizes[2],
            WIDTH=stack.width,
            SPLIT=1 if inner is None else len(inner),
            N_BLOCK=shape.block_n,
            JOINED=inner is None,
            num_warps=shape.expand_warps,
            **_common(stack, y.device),
        )
    return out


def lora_expand_gated(
    y: Tensor,
    inner: Tensor | None,
    stack: AdapterStack,
    tiles: AdapterTiles,
    activation: str,
) -> Tensor:
    """`ops.lora.lora_expand_gated`.

    Raises:
        ValueError: a shape or a dtype does not fit.
    """
    _check_expand("lora_expand_gated", y, inner, stack, tiles)
    outputs = sum(stack.sizes) // 2
    if stack.sizes != (outputs, outputs):
        raise ValueError(f"lora_expand_gated: {_form_of(stack)}, expected gate and up")
    count, shape = len(tiles.words), shape_of(len(tiles.words))
    # A program has a block of both.
    block_n = shape.block_n // 2
    out = y.new_empty(len(y), outputs)
    if count:
        expand_gated_kernel[(count, triton.cdiv(outputs, block_n))](
            *_expanded(y, inner, stack, tiles, out),
            y.stride(0),
            stack.b.stride(0),
            OUTPUTS=outputs,
            SPLIT=1 if inner is None else len(inner),
            N_BLOCK=block_n,
            GELU=IS_GELU[activation],
            JOINED=inner is None,
            num_warps=shape.expand_warps,
            **_common(stack, y.device),
        )
    return out


def _expanded(
    y: Tensor,
    inner: Tensor | None,
    stack: AdapterStack,
    tiles: AdapterTiles,
    out: Tensor,
) -> tuple[Any, ...]:
    """Return the first arguments of both kernels."""
    if inner is None:
        inner = y[:, sum(stack.sizes) :]
    return inner, stack.b, stack.ranks, tiles.words, y, out, len(y)


def _common(stack: AdapterStack, device: torch.device) -> dict[str, Any]:
    return {
        "RANK": stack.rank,
        "TILE_ROWS": TILE,
        **launch_options(device),
    }


def _check_expand(
    op: str,
    y: Tensor,
    inner: Tensor | None,
    stack: AdapterStack,
    tiles: AdapterTiles,
) -> None:
    outputs, rank = sum(stack.sizes), stack.rank
    joined = outputs + stack.b.shape[0] * stack.width
    fits = (
        y.dim() == 2
        and y.shape[1] == (joined if inner is None else outputs)
        and y.stride(1) == 1
        and stack.b.shape[1] == outputs
        and stack.b.stride()[1:] == (rank, 1)
        and rank % BLOCK_R == 0
        and 1 <= len(stack.sizes) <= MAX_SHARDS
        and y.dtype == stack.b.dtype
    )
    if inner is not None:
        shape = (len(tiles.words), TILE, stack.width)
        fits &= inner.shape[1:] == shape and inner.is_contiguous()
    if not fits:
        form = None if inner is None else _form(inner)
        raise ValueError(f"{op}: y {_form(y)}, inner {form}, {_form_of(stack)}")


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _form_of(stack: AdapterStack) -> str:
    return f"a {_form(stack.a)}, b {_form(stack.b)}, shards {stack.sizes}"
