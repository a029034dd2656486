"""Tiles of attention over expanded latents, and the parameters that follow from them.

Keyed by sizes alone. Knows nothing of tensors.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from sglang.srt.layers.ops.attention.extend.table import searched_rows
from sglang.srt.layers.ops.attention.shared.args import padded_head
from sglang.srt.layers.ops.attention.shared.launch import KernelLaunch


class TileChoice(NamedTuple):
    """Queries and elements of a tile; how it runs."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    is_v_late: bool


# By most channels of a tile: padded keys and values. DeepSeek's have 320.
HALF_TILES: dict[int, TileChoice] = {
    320: TileChoice(128, 64, 8, 3, False),
    640: TileChoice(128, 32, 8, 2, False),
}
FLOAT_TILES: dict[int, TileChoice] = {640: TileChoice(32, 16, 4, 1, False)}


class ExpandedShape(NamedTuple):
    """Sizes of a launch: heads, channels of a latent, of a head's key, of the rotated
    key and of a head's value, and the powers of two that hold the last three."""

    q_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    block_nope: int
    block_rope: int
    block_value: int

    @property
    def channels(self) -> int:
        """Channels of a tile's keys and values."""
        return self.block_nope + self.block_rope + self.block_value


class ExpandedTile(NamedTuple):
    """Tile of the kernel: block_m tokens of one head, block_n elements, the depth of
    the pipeline over them, and whether the product with V runs one tile late."""

    block_m: int
    block_n: int
    stages: int
    is_v_late: bool


def serves(*, nope: int, rope: int, value: int) -> bool:
    """Return whether there is a tile for heads with these channels."""
    return sum(map(padded_head, (nope, rope, value))) <= max(HALF_TILES)


@functools.cache
def expanded_launch(
    shape: ExpandedShape,
    tile: TileChoice,
    *,
    rows: int,
    is_causal: bool,
    has_past: bool,
    pdl: bool,
) -> KernelLaunch:
    """Return compile-time parameters of the kernel."""
    return KernelLaunch(
        constants={
            "SHAPE": shape,
            "TILE": ExpandedTile(
                tile.block_m, tile.block_n, tile.stages, tile.is_v_late
            ),
            "BLOCK_R": searched_rows(rows),
            "ONE_ROW": rows == 1,
            "CAUSAL": is_causal,
            "HAS_PAST": has_past,
            "PDL": pdl,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl,
    )


@functools.cache
def expanded_shape(
    *, q_heads: int, rank: int, nope: int, rope: int, value: int
) -> ExpandedShape:
    blocks = (padded_head(size) for size in (nope, rope, value))
    return ExpandedShape(q_heads, rank, nope, rope, value, *blocks)


def choose_expanded_tile(shape: ExpandedShape, itemsize: int) -> TileChoice:
    """Return the narrowest tile that holds the channels of `shape`."""
    table = HALF_TILES if itemsize == 2 else FLOAT_TILES
    return table[min(most for most in table if shape.channels <= most)]
