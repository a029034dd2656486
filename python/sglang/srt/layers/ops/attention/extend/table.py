"""Which tile an extend launch uses, and whether programs share a row's KV elements.

One table per item size, keyed by shapes, and the compile-time parameters that follow
from a tile. Knows nothing of tensors.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from sglang.srt.layers.ops.attention.shared.args import (
    HeadShape,
    Tile,
    padded_head,
    shape_args,
)
from sglang.srt.layers.ops.attention.shared.launch import KernelLaunch

_SMALL_BATCH_ROWS = 16


def searched_rows(rows: int) -> int:
    """Return how many rows the search for a tile's row loads at a time."""
    return 16 if rows <= _SMALL_BATCH_ROWS else 256


class ExtendTile(NamedTuple):
    """Queries (tokens x heads of a group) and KV elements of a tile; how it runs.

    Fields:
        is_v_late: the product with V runs one tile late.
        masked_n: elements per step where some query must not see some element. A small
            value leaves registers to the main loop. Divides block_n.
        programs: programs wanted in flight. A row's KV elements are split until there
            are as many. 1 takes the short-row kernel without splits, 0 the long-row
            kernel.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    is_v_late: bool
    masked_n: int = 32
    programs: int = 0


class LaunchShape(NamedTuple):
    """Sizes that decide the tile."""

    tokens: int
    rows: int
    q_heads: int
    kv_heads: int
    head_dim: int


class ExtendChoice(NamedTuple):
    """The tile for launches with at most `queries` queries per row on average and at
    most `streams` KV streams (rows x KV heads x blocks of a group's query heads).
    """

    queries: float
    streams: float
    tile: ExtendTile


ExtendTable = dict[int, tuple[ExtendChoice, ...]]

_ANY = math.inf

# By padded head size; the first choice that covers a launch is used. Choices for short
# rows come from lab/sweeps/extend_split.py, for long ones from
# benchmark/kernels/bench_triton_attention.py --sweep.
HALF_TILES: ExtendTable = {
    64: (
        ExtendChoice(16, _ANY, ExtendTile(16, 64, 4, 3, True, programs=256)),
        ExtendChoice(32, _ANY, ExtendTile(32, 64, 4, 3, True, programs=256)),
        ExtendChoice(64, _ANY, ExtendTile(64, 64, 4, 3, True, programs=256)),
        ExtendChoice(256, 64, ExtendTile(64, 64, 4, 3, True, programs=256)),
        ExtendChoice(8192, _ANY, ExtendTile(64, 32, 4, 3, True)),
        ExtendChoice(_ANY, _ANY, ExtendTile(64, 64, 4, 3, True)),
    ),
    128: (
        ExtendChoice(16, 64, ExtendTile(16, 64, 4, 2, False, 64, programs=264)),
        ExtendChoice(16, _ANY, ExtendTile(16, 128, 8, 2, False, 32, programs=256)),
        ExtendChoice(32, 64, ExtendTile(32, 64, 4, 2, False, 32, programs=264)),
        ExtendChoice(32, _ANY, ExtendTile(64, 64, 4, 2, True, 32, programs=256)),
        ExtendChoice(64, _ANY, ExtendTile(64, 64, 4, 2, True, programs=256)),
        ExtendChoice(256, 64, ExtendTile(64, 64, 4, 3, False, 64, programs=256)),
        ExtendChoice(256, _ANY, ExtendTile(64, 64, 4, 3, False, 64, programs=512)),
        ExtendChoice(8192, _ANY, ExtendTile(64, 64, 4, 3, False)),
        ExtendChoice(_ANY, _ANY, ExtendTile(128, 128, 8, 3, False)),
    ),
    256: (
        ExtendChoice(64, 64, ExtendTile(64, 64, 8, 2, True, programs=256)),
        ExtendChoice(64, _ANY, ExtendTile(64, 64, 8, 2, True)),
        ExtendChoice(8192, _ANY, ExtendTile(128, 32, 8, 2, True)),
        ExtendChoice(_ANY, _ANY, ExtendTile(128, 64, 8, 2, True)),
    ),
}
FLOAT_TILES: ExtendTable = {
    64: (
        ExtendChoice(64, 64, ExtendTile(64, 64, 4, 3, True, programs=256)),
        ExtendChoice(_ANY, _ANY, ExtendTile(64, 64, 4, 3, True)),
    ),
    128: (ExtendChoice(_ANY, _ANY, ExtendTile(64, 32, 4, 2, True)),),
    256: (ExtendChoice(_ANY, _ANY, ExtendTile(64, 16, 8, 2, True, 16)),),
}


def heads_per_tile(group: int) -> int:
    """Return the query heads of a group that one tile takes."""
    return group if group <= 64 else 1


def choose_tile(shape: LaunchShape, *, itemsize: int) -> ExtendTile:
    """Choose the tile of a launch from shapes alone; item sizes are 2 and 4 bytes."""
    heads = heads_per_tile(shape.q_heads // shape.kv_heads)
    choices = (HALF_TILES if itemsize == 2 else FLOAT_TILES)[
        max(padded_head(shape.head_dim), 64)
    ]
    queries = shape.tokens * heads / shape.rows
    streams = shape.rows * (shape.q_heads // heads)
    return next(
        choice.tile
        for choice in choices
        if queries <= choice.queries
        and streams <= choice.streams
        and choice.tile.block_m >= heads
    )


def extend_launch(
    tile: ExtendTile, shape: LaunchShape, *, page_size: int
) -> KernelLaunch:
    """Return compile-time parameters of either kernel, chosen from shapes alone."""
    kernel_shape = shape_args(shape.q_heads, shape.kv_heads, shape.head_dim, page_size)
    return _make_launch(tile, kernel_shape, searched_rows(shape.rows))


@functools.cache
def _make_launch(tile: ExtendTile, shape: HeadShape, block_r: int) -> KernelLaunch:
    return KernelLaunch(
        constants={
            "SHAPE": shape,
            "TILE": Tile(
                heads=heads_per_tile(shape.group),
                block_m=tile.block_m,
                block_n=tile.block_n,
                masked_n=min(tile.block_n, tile.masked_n),
                stages=tile.stages,
                is_v_late=tile.is_v_late,
            ),
            "BLOCK_R": block_r,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
