"""Decides which kernel multiplies few rows by a weight of a given shape.

The rules follow measurements on an H200 (`lab/sweeps/triton_gemm.py`); no device is
queried.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.utils.triton_launch import MULTIPROCESSORS

MAX_ROWS = 64
"""With more rows than this cuBLAS is used."""
MAX_GATED_ROWS = 128
"""The same limit for a product followed by SiLU."""
MAX_EXACT_ROWS = 32
"""With more rows than this, inputs are rounded to 8 bits if the weight allows it, and
codes of 4 bits are multiplied as such only where there are many tiles."""
MIN_STEP = 16
"""Columns that the matrix units take at least."""

_SHARED_BYTES = 225 * 1024
_MIN_WIDTH = 1024
_MIN_BLOCKS_PER_SPLIT = 4
_MAX_STAGES = 10
_MIN_FILL = 0.8
# Without a split, because adding partial sums costs more than idle multiprocessors do.
_MIN_WHOLE_FILL = 0.7
_MAX_SHALLOW_ROWS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """Shape of one launch.

    Fields:
        block_n, block_k: tile of the weight per program and step; powers of two.
        split_k: programs that share a tile's sum; 0 for the one-row register kernel.
        stages: tiles in flight per program (matrix-unit kernel).
        prefetch: tiles requested before the preceding kernel has ended.
        warps: warps per program.
        dependent: launch before the preceding kernel has ended.
        is_tall: use `gated_gemm_kernel`, which keeps a tile of `MAX_GATED_ROWS` rows.
    """

    block_n: int
    block_k: int
    split_k: int
    stages: int = 1
    prefetch: int = 0
    warps: int = 4
    dependent: bool = True
    is_tall: bool = False

    @property
    def max_rows(self) -> int:
        if self.is_tall:
            return MAX_GATED_ROWS
        return MAX_ROWS if self.split_k else 1


_TALL = (
    GemmConfig(
        block_n=128, block_k=64, split_k=1, stages=4, prefetch=3, warps=8, is_tall=True
    ),
    GemmConfig(block_n=64, block_k=64, split_k=1, stages=7, prefetch=2, is_tall=True),
)


@functools.cache
def lookup(*, rows: int, n: int, k: int, gated: bool) -> GemmConfig | None:
    """Return the configuration for `rows` rows and a weight [n, k], or None for
    cuBLAS."""
    if min(n, k) < _MIN_WIDTH or k % 8:
        return None
    if rows > MAX_ROWS:
        is_taken = gated and rows <= MAX_GATED_ROWS
        return _tall(outputs=n // 2) if is_taken else None
    if rows == 1:
        return _one_row(n=n, k=k)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = -(-n // 64)
    if tiles >= 2 * MULTIPROCESSORS:
        return _many_tiles(tiles, block_m)
    if rows > _MAX_SHALLOW_ROWS and k < 8192:
        # cuBLAS reads x once per 128 or 256 outputs, which matters if x is large.
        return None
    return _split(tiles, k=k, block_m=block_m)


@functools.cache
def lookup_quantized(
    *, rows: int, n: int, k: int, group: int, packed: bool = False
) -> GemmConfig | None:
    """Return the configuration for `rows` rows, at most `MAX_ROWS`, and a quantised
    weight [n, k], or None where a plain copy of the weight is faster.

    Many tiles were measured on an H200, splits of 8 bits with a scale per row on an
    H100; other splits follow the same rules.

    Args:
        group: columns that share a scale, or 0 if all of a row do. A step of the sum
            stays inside of a group.
        packed: a byte has two codes; no kernel multiplies one row of them in registers.
    """
    block_k = min(128, group & -group) if group else 128
    if rows == 1 and not group and not packed:
        return _one_row_of_codes(k)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = -(-n // 64)
    if tiles < 2 * MULTIPROCESSORS:
        if packed and rows > MAX_EXACT_ROWS:
            return None
        if not group and not packed and block_m < 64 and k % 256 == 0:
            block_k = 256
        return _split_codes(
            tiles, k=k, block_m=block_m, block_k=block_k, per_byte=2 if packed else 1
        )
    if group or packed:
        # Sums of groups wait for each other, so that wider tiles win.
        warps = 4 if packed and block_m < 64 else 8
        found = GemmConfig(
            block_n=128, block_k=128, split_k=1, stages=3, prefetch=1, warps=warps
        )
    else:
        found = _many_tiles(tiles, block_m)
    return dataclasses.replace(found, block_k=block_k)


def _one_row_of_codes(k: int) -> GemmConfig:
    """Choose small programs that ask for whole rows at once."""
    block_k = 1024 if k > 4096 else min(4096, 1 << (k - 1).bit_length())
    return GemmConfig(block_n=2, block_k=block_k, split_k=0)


def _one_row(*, n: int, k: int) -> GemmConfig:
    """Choose small programs, many of which wait for memory at once, for short or few
    weight rows."""
    if k <= 1024:
        return GemmConfig(block_n=4, block_k=1024, split_k=0)
    if k <= 3072:
        if k % 1024:
            return GemmConfig(block_n=4, block_k=512, split_k=0, warps=2)
        return GemmConfig(block_n=2, block_k=1024, split_k=0, warps=2)
    if k <= 4096:
        if n <= 3072:
            return GemmConfig(block_n=4, block_k=2048, split_k=0, warps=8)
        if n <= 4096:
            # All of a program's weights are requested before the preceding kernel ends.
            return GemmConfig(block_n=4, block_k=4096, split_k=0, warps=8)
        return GemmConfig(block_n=2, block_k=2048, split_k=0)
    if n <= 3072 and k > 8192:
        return GemmConfig(block_n=8, block_k=1024, split_k=0)
    return GemmConfig(block_n=2, block_k=1024, split_k=0, warps=2)


def _stages(
    *, block_n: int, block_k: int, block_m: int, resident: int, per_byte: float = 0.5
) -> int:
    """Return the tiles in flight for each of `resident` programs per multiprocessor.

    Args:
        per_byte: columns of the weight in a byte.
    """
    tile_bytes = int(block_k * (block_n / per_byte + 2 * block_m))
    return max(2, min(_MAX_STAGES, _SHARED_BYTES // resident // tile_bytes))


def _many_tiles(tiles: int, block_m: int) -> GemmConfig:
    if block_m == 64:
        return GemmConfig(
            block_n=128, block_k=128, split_k=1, stages=2, prefetch=1, warps=8
        )
    resident = 3 if tiles > 8 * MULTIPROCESSORS else 2
    stages = _stages(block_n=64, block_k=128, block_m=block_m, resident=resident)
    return GemmConfig(block_n=64, block_k=128, split_k=1, stages=stages, prefetch=1)


def _tall(*, outputs: int) -> GemmConfig | None:
    """Choose the tall kernel if whole waves, one program per multiprocessor, are nearly
    full."""
    for config in _TALL:
        tiles = -(-outputs // config.block_n)
        waves = -(-tiles // MULTIPROCESSORS)
        if tiles >= _MIN_FILL * waves * MULTIPROCESSORS:
            return config
    return None


def _split(tiles: int, *, k: int, block_m: int) -> GemmConfig:
    """Choose the split that best fills one, two or three programs per multiprocessor.
    No split if the tiles alone nearly fill one and rows are many or short."""
    is_whole = _MIN_WHOLE_FILL <= tiles / MULTIPROCESSORS <= 1.0
    is_whole &= block_m == 64 or (block_m == 32 and k <= 3072)
    split, resident = (1, 1) if is_whole else _fullest(tiles, k=k, order=(1, 2, 3))
    stages = _stages(block_n=64, block_k=128, block_m=block_m, resident=resident)
    return GemmConfig(block_n=64, block_k=128, split_k=split, stages=stages, prefetch=2)


def _split_codes(
    tiles: int, *, k: int, block_m: int, block_k: int, per_byte: int
) -> GemmConfig:
    """As `_split`, but more programs are better: while some turn codes into values,
    others load."""
    split, resident = _fullest(tiles, k=k, order=(3, 2, 1))
    stages = _stages(
        block_n=64,
        block_k=block_k,
        block_m=block_m,
        resident=resident,
        per_byte=per_byte,
    )
    return GemmConfig(
        block_n=64, block_k=block_k, split_k=split, stages=stages, prefetch=2
    )


def _fullest(tiles: int, *, k: int, order: Sequence[int]) -> tuple[int, int]:
    """Return the (split, programs per multiprocessor) that leave fewest of these
    programs out; a later number in `order` must be clearly better."""
    best_fill, best = 0.0, (1, 1)
    most = max(1, -(-k // 128) // _MIN_BLOCKS_PER_SPLIT)
    for resident in order:
        room = MULTIPROCESSORS * resident
        split = max(1, min(room // tiles, most))
        fill = tiles * split / room
        if best_fill + 0.02 < fill <= 1.0:
            best_fill, best = fill, (split, resident)
    return best
