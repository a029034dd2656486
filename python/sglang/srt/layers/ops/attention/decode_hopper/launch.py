"""How `decode_hopper_kernel` is launched: which inputs it serves, tiles and splits."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from sglang.srt.layers.ops.attention.shared.args import (
    Compares,
    decode_tile,
    shape_args,
)
from sglang.srt.layers.ops.attention.shared.launch import (
    KernelLaunch,
    is_half_on_hopper,
)
from sglang.srt.utils.triton_launch import MULTIPROCESSORS

QUERIES = 16
"""Query heads of a tile, padded."""


class HopperTile(NamedTuple):
    """A tile of KV elements.

    Fields:
        block_n: elements. warps: warps per program.
        resident: programs that fit on a multiprocessor at once, by registers and shared
            memory; less where some of them are as fast as all.
        max_registers: of a thread, so that they fit; None leaves it to the compiler.
    """

    block_n: int
    warps: int
    resident: int
    max_registers: int | None = None


class StoredHead(NamedTuple):
    """Channels of a head, and bytes of a stored channel."""

    head_dim: int
    itemsize: int


_NARROW_IN_TURN = (HopperTile(64, 2, 6), HopperTile(32, 2, 8))
# In order of preference. Smaller tiles are slower, but more of their
# programs run at once. For heads of 128 channels that every launch compares, a warp has
# 16 elements, so that its threads have room for the digits of factors.
TILES: dict[Compares, dict[StoredHead, tuple[HopperTile, ...]]] = {
    Compares.NEVER: {
        StoredHead(64, 2): (
            HopperTile(64, 2, 6),
            HopperTile(32, 2, 9),
            HopperTile(32, 1, 12),
        ),
        StoredHead(128, 2): (
            HopperTile(32, 4, 4),
            HopperTile(32, 2, 6),
            HopperTile(16, 2, 8),
            HopperTile(16, 1, 12),
        ),
        StoredHead(256, 2): (HopperTile(32, 4, 3), HopperTile(16, 2, 5)),
        StoredHead(64, 1): (
            HopperTile(64, 2, 8),
            HopperTile(32, 2, 10),
            HopperTile(16, 2, 12),
        ),
        StoredHead(128, 1): (HopperTile(64, 4, 4, 128), HopperTile(32, 1, 8)),
        StoredHead(256, 1): (HopperTile(64, 4, 3), HopperTile(32, 2, 5)),
    },
    Compares.IN_TURN: {
        StoredHead(64, 2): _NARROW_IN_TURN,
        StoredHead(128, 2): (
            HopperTile(32, 4, 4),
            HopperTile(16, 2, 6),
            HopperTile(16, 1, 8),
        ),
        StoredHead(256, 2): (HopperTile(32, 4, 3), HopperTile(16, 2, 5)),
        StoredHead(64, 1): (HopperTile(64, 2, 8), HopperTile(32, 1, 15)),
        StoredHead(128, 1): (HopperTile(64, 2, 4), HopperTile(32, 1, 8)),
        StoredHead(256, 1): (HopperTile(64, 4, 3), HopperTile(32, 2, 5)),
    },
    Compares.ALWAYS: {
        StoredHead(64, 2): (*_NARROW_IN_TURN, HopperTile(32, 1, 12)),
        StoredHead(128, 2): (HopperTile(32, 2, 4), HopperTile(16, 1, 8)),
        StoredHead(256, 2): (HopperTile(32, 4, 3, 168), HopperTile(16, 2, 5)),
        StoredHead(64, 1): (HopperTile(64, 2, 8), HopperTile(32, 1, 16)),
        StoredHead(128, 1): (HopperTile(64, 2, 4), HopperTile(32, 1, 8)),
        StoredHead(256, 1): (HopperTile(64, 4, 3, 168), HopperTile(32, 2, 4)),
    },
}
STAGES = 2
"""Tiles in shared memory."""
# Programs on a multiprocessor of a launch with splits; more of them gain nothing.
_MOST_RESIDENT = 4
MANY_PROGRAMS = 16 * MULTIPROCESSORS
"""With more waves than this the last one hardly matters, so the largest tile wins."""
# The product after attention has this many columns where it pays to load its weights
# before the attention of a single row has ended.
_WIDE = 4096
# Registers of a thread that hold partial results while they are added up. They come
# from the tiles' products, which need more.
ADDED_REGISTERS = 64
# Reads that a program makes one after the other to add up a row's splits. With more,
# one program per head is faster.
MAX_READS = 8


def places_of(head: StoredHead, compares: Compares) -> int:
    """Return how many programs of a launch with splits run at once; any more would wait
    for a place."""
    tile = TILES[compares][head][0]
    return min(tile.resident, _MOST_RESIDENT) * MULTIPROCESSORS


def splits_that_fit(splits: int, *, programs: int, places: int) -> int:
    """Return a power of two of at most `splits` splits, with `programs` programs each,
    that all run at once in `places` places."""
    while splits > 1 and splits * programs > places:
        splits //= 2
    return splits


@functools.cache
def choose_tile(*, head: StoredHead, compares: Compares, programs: int) -> HopperTile:
    """Choose the tile that fills the device best. A last wave of few programs takes as
    long as a full one. Among equals, the tile with the fewest waves wins."""
    tiles = TILES[compares][head]

    def fill(tile: HopperTile) -> tuple[float, int]:
        places = MULTIPROCESSORS * tile.resident
        waves = -(-programs // places)
        return programs / (waves * places), -waves

    return tiles[0] if programs > MANY_PROGRAMS else max(tiles, key=fill)


def added_splits(*, group: int, head_dim: int, warps: int, splits: int) -> int:
    """Return how many splits the last program of a row and head block adds up at once,
    a power of two. 0 if another kernel adds them up, or there is one split."""
    heads = int(triton.next_power_of_2(min(group, QUERIES)))
    threads = 32 * warps
    at_once = ADDED_REGISTERS * threads // (heads * head_dim)
    # With one or two heads the threads share the splits.
    least = max(4 * threads // (heads * head_dim), 1)
    at_once = max(min(at_once, int(triton.next_power_of_2(splits))), least)
    return at_once if 1 < splits <= MAX_READS * at_once else 0


def serves_decode(
    *, group: int = 1, head_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the kernel computes these heads on this device; `dtype` is of queries."""
    is_listed = StoredHead(head_dim, dtype.itemsize) in TILES[Compares.NEVER]
    return group <= QUERIES and is_listed and is_half_on_hopper(dtype, device)


def decode_hopper_launch(
    *,
    rows: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    page_size: int,
    splits: int,
    compares: Compares = Compares.NEVER,
) -> KernelLaunch:
    """Compile-time parameters of the kernel, chosen from shapes alone. `itemsize` is of
    stored K and V."""
    shape = shape_args(q_heads, kv_heads, head_dim, page_size)
    programs = rows * splits * kv_heads * -(-shape.group // QUERIES)
    head = StoredHead(head_dim, itemsize)
    tile = choose_tile(head=head, compares=compares, programs=programs)
    added = added_splits(
        group=shape.group, head_dim=head_dim, warps=tile.warps, splits=splits
    )
    return KernelLaunch(
        constants={
            "SHAPE": shape,
            "TILE": decode_tile(QUERIES, tile.block_n, splits),
            "STAGES": STAGES,
            "COMPARES": int(compares),
            "ADDED": added,
            "LETS_NEXT_START": rows > 1 or q_heads * head_dim >= _WIDE,
        },
        num_warps=tile.warps,
        num_stages=STAGES,
        max_registers=tile.max_registers,
    )
