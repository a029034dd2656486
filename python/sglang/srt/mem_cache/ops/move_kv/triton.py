"""Move of KV slots in all layers with one launch.

A program owns a few channels of one layer's K or V for all moves. It loads all of them
before it stores any, and no other program touches these channels, so sources and
targets may overlap without a barrier across programs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.mem_cache.ops.move_kv.op import (
    MOVE_SIZES,
    as_movable,
    move_kv_cache_ref,
)

MAX_MOVES = MOVE_SIZES[-1]
"""Moves that one launch can hold in registers."""

_TILE = 32768
_MAX_CHANNELS = 256
_ELEMENTS_PER_WARP = 2048


@triton.jit(do_not_specialize=["moves"], do_not_specialize_on_alignment=["dst", "src"])
def move_kv_kernel(
    k,
    v,
    dst,
    src,
    moves,
    layer_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    MOVES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    layer = (tl.program_id(0) // 2).to(tl.int64)
    move = tl.arange(0, MOVES)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    source = tl.load(src + move, mask=move < moves, other=0)
    target = tl.load(dst + move, mask=move < moves, other=0)
    mask = (move < moves)[:, None] & (channel < WIDTH)[None, :]
    if tl.program_id(0) % 2 == 0:
        base = k + layer * layer_stride
    else:
        base = v + layer * layer_stride
    rows = tl.load(base + source[:, None] * slot_stride + channel[None, :], mask=mask)
    # Threads of a program do not run in lockstep: without a barrier one could store to
    # a row that another has yet to load.
    tl.debug_barrier()
    tl.store(base + target[:, None] * slot_stride + channel[None, :], rows, mask=mask)


def move_kv_cache(
    k_buffer: Tensor, v_buffer: Tensor, *, dst: Tensor, src: Tensor
) -> None:
    """`move_kv_cache` of `op.py`. More than `MAX_MOVES` slots are copied in torch,
    which allocates.

    Raises:
        ValueError: the buffers differ in layout, or a slot has gaps.
    """
    moves = src.numel()
    k_buffer, v_buffer = as_movable(k_buffer), as_movable(v_buffer)
    if k_buffer.stride() != v_buffer.stride() or k_buffer.shape != v_buffer.shape:
        raise ValueError("move_kv_cache: k_buffer and v_buffer differ in layout")
    width = k_buffer[0, 0].numel()
    if not k_buffer[0, 0].is_contiguous():
        raise ValueError("move_kv_cache: the elements of a slot are not contiguous")
    if moves == 0:
        return
    if moves > MAX_MOVES:
        move_kv_cache_ref(k_buffer, v_buffer, dst=dst, src=src)
        return
    tile_moves, channels = tile_shape(moves, width)
    grid = (2 * k_buffer.shape[0], triton.cdiv(width, channels))
    move_kv_kernel[grid](
        k_buffer,
        v_buffer,
        dst,
        src,
        moves,
        k_buffer.stride(0),
        k_buffer.stride(1),
        WIDTH=width,
        MOVES=tile_moves,
        CHANNELS=channels,
        num_warps=warps_for(tile_moves * channels),
    )


def warps_for(elements: int) -> int:
    """Return the warps of a program that holds `elements` elements."""
    return min(max(elements // _ELEMENTS_PER_WARP, 4), 16)


def tile_shape(moves: int, width: int) -> tuple[int, int]:
    """Return (moves, channels) of one program: powers of two, `_TILE` elements."""
    moves = next(size for size in MOVE_SIZES if moves <= size)
    channels = min(triton.next_power_of_2(width), _MAX_CHANNELS, max(_TILE // moves, 8))
    return moves, channels
