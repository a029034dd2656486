"""How `decode_hopper_kernel` is launched: which inputs it serves, tiles and splits."""

from __future__ import annotations

import torch
import triton

from sglang.srt.layers.attention.triton_ops.args import (
    Compares,
    decode_tile,
    shape_args,
)
from sglang.srt.layers.attention.triton_ops.extend_hopper import serves
from sglang.srt.layers.attention.triton_ops.launch import Launch

QUERIES = 16
"""Query heads of a tile, padded."""
# By head size: KV elements of a tile, warps, tiles in shared memory; from a sweep over
# them with 1 to 64 splits of 1 to 256 rows.
TILES = {64: (64, 2, 2), 128: (32, 4, 2)}
# Where bytes are compared in every launch: 16 elements of each warp, whose threads then
# have room for the digits of factors.
COMPARING_TILES = {64: (64, 2, 2), 128: (32, 2, 2)}
# Programs that the card holds at once, four per multiprocessor; with more, some
# wait for the others' places.
_PLACES = 528
# Registers of a thread that hold partial results while they are added up: the tiles'
# products, whose registers they take, need more.
ADDED_REGISTERS = 64
# Reads one after the other of a program that adds up a row's splits; where there were
# more a program per head is faster.
MAX_READS = 8


def splits_that_fit(splits: int, programs: int) -> int:
    """A power of two of splits, or fewer, of which all programs run at once: `programs`
    of each split."""
    while splits > 1 and splits * programs > _PLACES:
        splits //= 2
    return splits


def added_splits(*, group: int, head_dim: int, warps: int, splits: int) -> int:
    """Splits that the last program of a row and head block adds up at once, a power of
    two; 0: another kernel adds them up, or there is one split."""
    heads = int(triton.next_power_of_2(min(group, QUERIES)))
    threads = 32 * warps
    at_once = ADDED_REGISTERS * threads // (heads * head_dim)
    # Of a head or two the threads share out the splits.
    least = max(4 * threads // (heads * head_dim), 1)
    at_once = max(min(at_once, int(triton.next_power_of_2(splits))), least)
    return at_once if 1 < splits <= MAX_READS * at_once else 0


def serves_decode(
    *, group: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the kernel computes these heads on this device."""
    return group <= QUERIES and serves(head_dim=head_dim, dtype=dtype, device=device)


def decode_hopper_launch(
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    splits: int,
    compares: Compares = Compares.NEVER,
) -> Launch:
    """Compile-time parameters of the kernel, chosen from shapes alone."""
    tiles = COMPARING_TILES if compares is Compares.ALWAYS else TILES
    block_n, warps, stages = tiles[head_dim]
    shape = shape_args(q_heads, kv_heads, head_dim, page_size)
    added = added_splits(
        group=shape.group, head_dim=head_dim, warps=warps, splits=splits
    )
    return Launch(
        constants={
            "SHAPE": shape,
            "TILE": decode_tile(QUERIES, block_n, splits),
            "STAGES": stages,
            "COMPARES": int(compares),
            "ADDED": added,
        },
        num_warps=warps,
        num_stages=stages,
    )
