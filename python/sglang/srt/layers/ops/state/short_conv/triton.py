"""Launches of the short convolution. `reference.py` describes the functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from kv_canary.state_sums import CONV_CHANNELS
from sglang.srt.layers.ops.state.shared.counts import count_arguments
from sglang.srt.layers.ops.state.shared.rows import search_steps
from sglang.srt.layers.ops.state.shared.sums import sum_arguments
from sglang.srt.layers.ops.state.shared.track_launch import track_arguments
from sglang.srt.layers.ops.state.short_conv.conv_filter import (
    ConvFilter,
    require_conv,
    require_state,
)
from sglang.srt.layers.ops.state.short_conv.triton_kernels import (
    ConvSizes,
    conv_kernel,
    decode_kernel,
    fold_kernel,
)
from sglang.srt.utils.triton_launch import block_of, launch_options, require

if TYPE_CHECKING:
    from sglang.srt.layers.ops.state.shared.tracks import StateTracks
    from sglang.srt.mem_cache.state_sums import StateSums

TOKENS = 16
"""Tokens of a program; each reads W - 1 inputs of its neighbours again."""
CHANNELS = CONV_CHANNELS
"""Channels of a program: a cell of checksums."""


def conv_sizes(conv: ConvFilter) -> ConvSizes:
    channels, width = conv.weight.shape
    return ConvSizes(
        channels=channels,
        channel_block=min(block_of(channels, least=16), CHANNELS),
        width=width,
        silu=conv.silu,
    )


def short_conv_decode(
    x: Tensor,
    conv: ConvFilter,
    state: Tensor,
    *,
    slots: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> Tensor:
    _require_memory(x, conv, state)
    rows, channels = x.shape
    require("short_conv", rows, torch.int64, slots=slots)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        sizes = conv_sizes(conv)
        decode_kernel[(triton.cdiv(channels, sizes.channel_block), rows)](
            x,
            conv.weight,
            conv.bias,
            state,
            slots,
            out,
            x.stride(0),
            state.stride(0),
            **count_arguments(folded, state),
            **sum_arguments(sums, state),
            SIZES=sizes,
            num_warps=1,
            **launch_options(x.device),
        )
    return out


def short_conv_prefill(
    x: Tensor,
    conv: ConvFilter,
    state: Tensor,
    *,
    slots: Tensor,
    qo_indptr: Tensor,
    has_state: Tensor,
    tracks: StateTracks | None = None,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> Tensor:
    _require_memory(x, conv, state)
    rows = len(slots)
    require("short_conv", rows, torch.int64, slots=slots)
    require("short_conv", rows + 1, torch.int64, qo_indptr=qo_indptr)
    require("short_conv", rows, torch.bool, has_state=has_state)
    if not rows:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    out = _convolve(
        x,
        conv,
        state,
        slots=slots,
        qo_indptr=qo_indptr,
        has_state=has_state,
        parent_index=None,
        nodes=0,
    )
    # In a launch of its own, because other tokens read the old state.
    _fold(
        x,
        state,
        slots=slots,
        qo_indptr=qo_indptr,
        has_state=has_state,
        path=None,
        path_lens=None,
        path_width=0,
        folded=folded,
        tracks=tracks,
        sums=sums,
    )
    return out


def short_conv_tree(
    x: Tensor,
    conv: ConvFilter,
    state: Tensor,
    *,
    slots: Tensor,
    parent_index: Tensor,
    sums: StateSums | None = None,
) -> Tensor:
    _require_memory(x, conv, state)
    rows, nodes = parent_index.shape
    require("short_conv", rows, torch.int64, slots=slots)
    require("short_conv", len(x), torch.int64, parent_index=parent_index)
    return _convolve(
        x,
        conv,
        state,
        slots=slots,
        qo_indptr=None,
        has_state=None,
        parent_index=parent_index,
        nodes=nodes,
        sums=sums,
    )


def short_conv_commit(
    x: Tensor,
    state: Tensor,
    *,
    slots: Tensor,
    path: Tensor,
    path_lens: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> None:
    require_state(x, state)
    _require_rows(x, state)
    rows, width = path.shape
    require("short_conv", rows, torch.int64, slots=slots, path_lens=path_lens)
    require("short_conv", rows * width, torch.int64, path=path)
    if rows:
        _fold(
            x,
            state,
            slots=slots,
            qo_indptr=None,
            has_state=None,
            path=path,
            path_lens=path_lens,
            path_width=width,
            folded=folded,
            sums=sums,
        )


def _convolve(
    x: Tensor,
    conv: ConvFilter,
    state: Tensor,
    *,
    slots: Tensor,
    qo_indptr: Tensor | None,
    has_state: Tensor | None,
    parent_index: Tensor | None,
    nodes: int,
    sums: StateSums | None = None,
) -> Tensor:
    tokens, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        sizes = conv_sizes(conv)
        grid = triton.cdiv(channels, sizes.channel_block), triton.cdiv(tokens, TOKENS)
        conv_kernel[grid](
            x,
            conv.weight,
            conv.bias,
            state,
            slots,
            qo_indptr,
            has_state,
            parent_index,
            out,
            tokens,
            len(slots),
            x.stride(0),
            state.stride(0),
            **sum_arguments(sums, state),
            NODES=nodes,
            TOKENS=TOKENS,
            STEPS=search_steps(len(slots)),
            SIZES=sizes,
            num_warps=4,
            **launch_options(x.device),
        )
    return out


def _fold(
    x: Tensor,
    state: Tensor,
    *,
    slots: Tensor,
    path_width: int,
    folded: Tensor | None,
    sums: StateSums | None,
    tracks: StateTracks | None = None,
    **ranges: Tensor | None,
) -> None:
    channels = state.shape[1]
    block = min(block_of(channels, least=16), CHANNELS)
    options: dict[str, Any] = launch_options(x.device)
    fold_kernel[(triton.cdiv(channels, block), len(slots))](
        x,
        state,
        slots,
        ranges["qo_indptr"],
        ranges["has_state"],
        ranges["path"],
        ranges["path_lens"],
        len(x),
        path_width,
        x.stride(0),
        state.stride(0),
        **count_arguments(folded, state),
        **sum_arguments(sums, state),
        **track_arguments("short_conv", tracks, rows=len(slots)),
        CHANNELS=channels,
        CHANNEL_BLOCK=block,
        WIDTH=state.shape[2] + 1,
        num_warps=1,
        **options,
    )


def _require_memory(x: Tensor, conv: ConvFilter, state: Tensor) -> None:
    """Check what the kernels index as raw memory."""
    require_conv(x, conv, state)
    _require_rows(x, state)
    dtype = conv.weight.dtype
    require("short_conv", conv.weight.numel(), dtype, weight=conv.weight)
    if conv.bias is not None:
        require("short_conv", len(conv.weight), dtype, bias=conv.bias)


def _require_rows(x: Tensor, state: Tensor) -> None:
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError("short_conv: the channels of a token are not contiguous")
    if len(state) and not state[0].is_contiguous():
        raise ValueError("short_conv: the state of a slot is not contiguous")
