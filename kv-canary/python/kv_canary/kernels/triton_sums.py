"""Sums of the words of KV heads in Triton: `head_sums.py`, and the table of them.

`data` and HASHING are tuples of `triton_args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary import head_sums
from kv_canary.kernels.triton_hash import mix64

V_PLACE = tl.constexpr(head_sums.V_PLACE)
MIX_1 = tl.constexpr(head_sums.MIX_1)
MIX_2 = tl.constexpr(head_sums.MIX_2)
SLOT_FACTOR = tl.constexpr(head_sums.SLOT_FACTOR)
ENDS = tl.constexpr((1 << 31) | 1)


@triton.jit
def word_factors(place):
    """`head_sums.word_factors` of places, uint32."""
    x = place.to(tl.uint32)
    x = (x ^ (x >> 16)) * MIX_1
    x = (x ^ (x >> 15)) * MIX_2
    return (x ^ (x >> 16)) | ENDS


@triton.jit
def slot_factors(slot):
    """Odd factors, uint32, that keep sums of slots apart where they are added up."""
    return (slot.to(tl.uint32) * SLOT_FACTOR) | 1


@triton.jit
def fold_products(word, factor):
    """`head_sums.fold_products` of uint32."""
    product = word.to(tl.uint64) * factor.to(tl.uint64)
    return product.to(tl.uint32) + (product >> 32).to(tl.uint32)


@triton.jit
def _sum_halves(word, place):
    """Folded products of 64-bit words, whose lower halves have these places."""
    low = fold_products(word.to(tl.uint32), word_factors(place))
    high = (word >> 32).to(tl.uint32)
    return low + fold_products(high, word_factors(place + 1))


@triton.jit
def _sum_cells(
    words,
    layers,
    slot_stride,
    slot,
    layer,
    head,
    mask,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SCATTERED: tl.constexpr,
):
    """Sums [cells] of the 64-bit words of K or of V of heads of slots and layers."""
    at = tl.load(layers + layer) if SCATTERED else layer * layers
    at = words + at + slot * slot_stride + head * SIZE
    word = tl.arange(0, PADDED)
    inside = mask[:, None] & (word < SIZE)[None, :]
    loaded = tl.load(at[:, None] + word[None, :], mask=inside, other=0)
    place = FIRST + 2 * (head[:, None] * SIZE + word[None, :])
    return tl.sum(_sum_halves(loaded, place), axis=1)


@triton.jit
def _spread(x, STEP: tl.constexpr):
    """Each of [N], STEP times: [N * STEP]."""
    N: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, None], (N, STEP)), (N * STEP,))


@triton.jit
def _sum_heads(data, slots, cell, inside, HASHING: tl.constexpr):
    """Sums, uint32 [cells], of heads of slots by their number."""
    HEADS: tl.constexpr = HASHING.heads
    # Past the end: the last layer, which has a place.
    layer = tl.minimum(cell // HEADS, HASHING.layers - 1).to(tl.int64)
    head = (cell % HEADS).to(tl.int64)
    sums = _sum_cells(
        data.k_words,
        data.k_layers,
        data.k_slot_stride,
        slots,
        layer,
        head,
        inside,
        FIRST=0,
        SIZE=HASHING.k_words // HEADS,
        PADDED=HASHING.head_block,
        SCATTERED=HASHING.scattered,
    )
    return sums + _sum_cells(
        data.v_words,
        data.v_layers,
        data.v_slot_stride,
        slots,
        layer,
        head,
        inside,
        FIRST=V_PLACE,
        SIZE=HASHING.v_words // HEADS,
        PADDED=HASHING.head_block,
        SCATTERED=HASHING.scattered,
    )


@triton.jit
def store_head_sums(data, slot, mask, split, splits, HASHING: tl.constexpr):
    """Put the sums of the heads of slots [N] into the table; this program's share."""
    STEP: tl.constexpr = HASHING.cells
    CELLS: tl.constexpr = HASHING.layers * HASHING.heads
    slots, wanted = _spread(slot, STEP), _spread(mask, STEP)
    for start in range(split * STEP, CELLS, splits * STEP):
        cell = start + tl.arange(0, slots.shape[0]) % STEP
        inside = wanted & (cell < CELLS)
        sums = _sum_heads(data, slots, cell, inside, HASHING)
        at = data.sums + slots * CELLS + cell
        tl.store(at, sums.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def whole_sums(data, slot, mask, HASHING: tl.constexpr):
    """(`head_sums.whole_sums` of what lies in slots [N], the same of the sums kept)."""
    SLOTS: tl.constexpr = slot.shape[0]
    STEP: tl.constexpr = HASHING.cells
    CELLS: tl.constexpr = HASHING.layers * HASHING.heads
    slots, wanted = _spread(slot, STEP), _spread(mask, STEP)
    computed = tl.zeros([SLOTS], tl.int64)
    kept = tl.zeros([SLOTS], tl.int64)
    for start in range(0, CELLS, STEP):
        cell = start + tl.arange(0, SLOTS * STEP) % STEP
        inside = wanted & (cell < CELLS)
        factor = mix64(cell.to(tl.int64)) | 1
        now = _sum_heads(data, slots, cell, inside, HASHING).to(tl.int64)
        now = tl.where(inside, now * factor, 0)
        computed += tl.sum(tl.reshape(now, (SLOTS, STEP)), 1)
        at = data.sums + slots * CELLS + cell
        then = tl.load(at, mask=inside, other=0).to(tl.uint32, bitcast=True)
        then = tl.where(inside, then.to(tl.int64) * factor, 0)
        kept += tl.sum(tl.reshape(then, (SLOTS, STEP)), 1)
    return computed, kept
