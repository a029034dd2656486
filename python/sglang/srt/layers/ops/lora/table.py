"""Sizes of the launches of adapters' products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of launches.

    Fields:
        most_tiles: use these up to this many tiles, or always if None.
        slice_k: channels of a part of the sum over K, a multiple of `block_k`. Short
            parts keep all multiprocessors busy if there are few tiles; each is stored
            once, and read by every block of outputs.
        block_k, shrink_warps: of a step of `shrink_kernel`.
        block_n, expand_warps: outputs of a program of the other kernels.
    """

    most_tiles: int | None
    slice_k: int
    block_k: int
    shrink_warps: int
    block_n: int
    expand_warps: int


FEW_TILES = 64

SHAPES = (
    Shape(
        most_tiles=FEW_TILES,
        slice_k=1024,
        block_k=512,
        shrink_warps=2,
        block_n=128,
        expand_warps=4,
    ),
    Shape(
        most_tiles=None,
        slice_k=4096,
        block_k=128,
        shrink_warps=4,
        block_n=128,
        expand_warps=4,
    ),
)
"""By number of tiles, ascending."""

TILE_COUNTS = (1, FEW_TILES + 1)
"""One for each of them."""


def shape_of(tiles: int) -> Shape:
    """Return the sizes of launches over this many tiles."""
    return next(s for s in SHAPES if s.most_tiles is None or tiles <= s.most_tiles)
