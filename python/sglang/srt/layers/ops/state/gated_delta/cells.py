"""What the Triton kernels of the gated delta rule share: their constants, the cells of
a head's S, and the heads of a chunk."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kv_canary.kernels.triton.state_sums import weigh


class DeltaSizes(NamedTuple):
    """Constants that the kernels are compiled for; their argument SIZES.

    Fields:
        heads, group: value heads, and how many share a key head.
        d_k, d_v: channels; k_block: power of two that holds d_k.
        v_tile: channels of d_v of a program.
        normalise: as in `DeltaInputs`.
    """

    heads: int
    group: int
    d_k: int
    k_block: int
    d_v: int
    v_tile: int
    normalise: bool


@triton.jit
def normed(x, axis: tl.constexpr, NORMALISE: tl.constexpr):
    """Divide float32 vectors along `axis` by their l2 norm, if asked to."""
    if NORMALISE:
        x *= tl.rsqrt(tl.sum(x * x, axis=axis, keep_dims=True) + 1e-6)
    return x


@triton.jit
def state_cells(state, slot, stride, head, channel, column, SIZES: tl.constexpr):
    """Return pointers to cells of a head's S, [channels, columns], and their mask."""
    place = (head * SIZES.d_k + channel[:, None]) * SIZES.d_v + column[None, :]
    is_cell = (channel < SIZES.d_k)[:, None] & (column < SIZES.d_v)[None, :]
    return state + slot * stride + place, is_cell


@triton.jit
def cell_of(head, SIZES: tl.constexpr):
    """Return the cell that a program has of a head."""
    return head * ((SIZES.d_v + SIZES.v_tile - 1) // SIZES.v_tile) + tl.program_id(0)


@triton.jit
def weigh_cells(sums, elements, channel, column, is_cell, SIZES: tl.constexpr):
    """Return what elements [channels, columns] add to the sum of a program's cell."""
    if SIZES.d_k == SIZES.k_block and SIZES.d_v % SIZES.v_tile == 0:
        return weigh(sums, elements, channel, column, None)
    else:
        return weigh(sums, elements, channel, column, is_cell)


@triton.jit
def is_first(head):
    """Whether this program has the first channels of the first head of its row."""
    return (tl.program_id(0) == 0) & (head == 0)


@triton.jit
def load_heads(x, token, head, stride, is_token, SIZES: tl.constexpr):
    """Load one key head of a chunk, [tokens, k_block]; zeros outside."""
    channel = tl.arange(0, SIZES.k_block)
    place = token.to(tl.int64)[:, None] * stride + head * SIZES.d_k + channel[None, :]
    mask = is_token[:, None] & (channel < SIZES.d_k)[None, :]
    return tl.load(x + place, mask=mask, other=0.0)
