"""How `decode_hopper_kernel` is launched: which inputs it serves, tiles and splits."""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.triton_ops.args import (
    Compares,
    DecodeTile,
    shape_args,
)
from sglang.srt.layers.attention.triton_ops.extend_hopper import serves
from sglang.srt.layers.attention.triton_ops.launch import Launch

QUERIES = 16
"""Query heads of a tile, padded."""
# By head size: KV elements of a tile, warps, tiles in shared memory; from a sweep over
# both with 1 to 8 splits of 16, 64 and 256 rows.
TILES = {64: (64, 2, 2), 128: (32, 2, 2)}
# Of a thread where bytes are compared: so that as many programs share a multiprocessor
# as its shared memory holds, six.
CHECKED_REGISTERS = 168


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
    block_n, warps, stages = TILES[head_dim]
    return Launch(
        constants={
            "SHAPE": shape_args(q_heads, kv_heads, head_dim, page_size),
            "TILE": DecodeTile(QUERIES, block_n, splits),
            "STAGES": stages,
            "COMPARES": int(compares),
        },
        num_warps=warps,
        num_stages=stages,
        max_registers=None if compares is Compares.NEVER else CHECKED_REGISTERS,
    )
