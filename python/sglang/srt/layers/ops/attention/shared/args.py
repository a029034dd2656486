"""Arguments of the attention kernels, grouped: each named tuple is one argument.

Triton compiles a kernel anew for each pattern of None in a tuple, and for numbers that
are 1 or multiples of 16. So tuples hold numbers that stay constant while a server runs;
numbers that change between launches are separate arguments. Kernels take `HeadShape`
and their tiles as compile-time constants, so every field is known when they are
compiled.
"""

from __future__ import annotations

import functools
import math
from enum import IntEnum
from typing import Any, NamedTuple

import triton
from torch import Tensor


class TokenArgs(NamedTuple):
    """[T, heads, head_dim] with `stride` between tokens, otherwise contiguous."""

    at: Tensor
    stride: int


class Pool(NamedTuple):
    """K and V of every slot: each [slots, KV heads, head_dim], contiguous channels."""

    k: Tensor
    v: Tensor
    k_slot_stride: int
    k_head_stride: int
    v_slot_stride: int
    v_head_stride: int


class PageArgs(NamedTuple):
    """int32 [table rows, pages]: first slots of pages. `row_index`, int64 [R], says
    which table row each row reads, or is None if row r reads table row r."""

    table: Tensor
    row_stride: int
    column_stride: int
    row_index: Tensor | None


class Lens(NamedTuple):
    """int64: row r has new tokens qo_indptr[r] .. qo_indptr[r + 1], after
    prefix_lens[r] elements of its KV. `qo_indptr` may be None for latents: each row
    then has one new token, which `prefix_lens` counts."""

    qo_indptr: Tensor | None
    prefix_lens: Tensor


class NewKV(NamedTuple):
    """K and V of the new tokens, each [T, KV heads, head_dim], as in `TokenArgs`."""

    k: Tensor
    v: Tensor
    k_stride: int
    v_stride: int


class Partials(NamedTuple):
    """Partial results, float32 [cells, head_dim], and log2 of their softmax sums,
    float32 [cells]; a cell is (token, query head, split)."""

    results: Tensor
    lse: Tensor


class Scale(NamedTuple):
    """How products of q and k become scores, whose exponents are powers of two.

    Without a cap a score is `factor` times the product. With a cap it is `cap` times
    the tanh of `factor` times the product; `cap` has the same units.
    """

    factor: float
    cap: float | None


class HeadShape(NamedTuple):
    """Heads and pages of a launch.

    Fields:
        group: query heads that share a KV head.
        block_d: channels of a tile: head_dim padded to a power of two.
    """

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    block_d: int


class Tile(NamedTuple):
    """Tile of the extend kernels that read new K and V from the pool.

    Fields:
        heads: query heads of a group that share the tile with block_m // heads tokens.
        block_m, block_n: queries and KV elements.
        masked_n: elements where some query must not attend some. Divides block_n.
        stages: depth of the software pipeline of the main loop.
        is_v_late: the product with V runs one tile late.
    """

    heads: int
    block_m: int
    block_n: int
    masked_n: int
    stages: int
    is_v_late: bool


class DenseTile(NamedTuple):
    """Tile of the extend kernel that reads new K and V from the inputs. Like `Tile`,
    with `gather_n` elements of the prefix at a time."""

    heads: int
    block_m: int
    block_n: int
    gather_n: int
    masked_n: int
    stages: int


class Compares(IntEnum):
    """When decode attention compares the bytes it loads: never, in every launch, or
    when the forward's number modulo the layers is the launch's layer."""

    NEVER = 0
    ALWAYS = 1
    IN_TURN = 2


class ByteCheck(NamedTuple):
    """The checksums that decode attention compares with, and where it reports.

    Fields:
        state: `State` of the canary's launches.
        sums: int32 [slots, layers, KV heads], `slot_stride` between slots.
        layers: layers of the group of slots.
        req_rows, serials, prefix_lens: int64 [R], the request each row belongs to, and
            its elements from before this forward. `first_position`: int64 [R], position
            of element 0, or None for 0.
        tag: from `ring_tag`.
    """

    state: Any
    sums: Tensor
    slot_stride: int
    layers: int
    req_rows: Tensor
    serials: Tensor
    prefix_lens: Tensor
    first_position: Tensor | None
    tag: int


class DecodeTile(NamedTuple):
    """Tile of the decode kernels: query heads and KV elements, most splits of a row,
    and fewest tiles of a split."""

    block_h: int
    block_n: int
    splits: int
    least_tiles: int


MIN_ELEMENTS_PER_SPLIT = 64


def decode_tile(block_h: int, block_n: int, splits: int) -> DecodeTile:
    least_tiles = max(MIN_ELEMENTS_PER_SPLIT // block_n, 1)
    return DecodeTile(block_h, block_n, splits, least_tiles)


def scale_args(sm_scale: float, logit_cap: float) -> Scale:
    """Return the `Scale` for the attention ops' `sm_scale` and `logit_cap`."""
    if logit_cap > 0:
        return Scale(sm_scale / logit_cap, logit_cap * math.log2(math.e))
    return Scale(sm_scale * math.log2(math.e), None)


def tokens_args(tensor: Tensor) -> TokenArgs:
    return TokenArgs(tensor, tensor.stride(0))


def pool_args(k_cache: Tensor, v_cache: Tensor) -> Pool:
    k_slot_stride, k_head_stride, _ = k_cache.stride()
    v_slot_stride, v_head_stride, _ = v_cache.stride()
    return Pool(
        k_cache, v_cache, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride
    )


def pages_args(page_table: Tensor, row_index: Tensor | None) -> PageArgs:
    row_stride, column_stride = page_table.stride()
    return PageArgs(page_table, row_stride, column_stride, row_index)


@functools.cache
def padded_head(head_dim: int) -> int:
    """Return the channels of a tile: `head_dim` padded."""
    return max(int(triton.next_power_of_2(head_dim)), 16)


@functools.cache
def shape_args(q_heads: int, kv_heads: int, head_dim: int, page_size: int) -> HeadShape:
    return HeadShape(
        kv_heads=kv_heads,
        group=q_heads // kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block_d=padded_head(head_dim),
    )
