"""Checksums of KV heads' bytes in Triton (`head_sums.py`), and their table.

`data` and HASHING are tuples from `args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary import head_sums
from kv_canary.kernels.triton.hash import mix64

V_PLACE = tl.constexpr(head_sums.V_PLACE)
MIX_1 = tl.constexpr(head_sums.MIX_1)
MIX_2 = tl.constexpr(head_sums.MIX_2)
SLOT_FACTOR = tl.constexpr(head_sums.SLOT_FACTOR)


@triton.jit
def mix32(place):
    """Return `head_sums.mix32` of places, uint32."""
    x = place.to(tl.uint32)
    x = (x ^ (x >> 16)) * MIX_1
    x = (x ^ (x >> 15)) * MIX_2
    return x ^ (x >> 16)


@triton.jit
def byte_factors(place):
    """Return `head_sums.byte_factors` of places, uint32."""
    return mix32(place) | 1


@triton.jit
def slot_factors(slot):
    """Return odd factors, uint32, that keep the sums of slots apart when added up."""
    return (slot.to(tl.uint32) * SLOT_FACTOR) | 1


@triton.jit
def _byte_product(word, place, NUMBER: tl.constexpr):
    """Multiply byte NUMBER (0 is the lowest) of uint32 words by its place's factor."""
    byte = (word << (24 - 8 * NUMBER)).to(tl.int32, bitcast=True) >> 24
    return byte.to(tl.uint32, bitcast=True) * byte_factors(place + NUMBER)


@triton.jit
def sum_bytes(word, place):
    """Multiply the four bytes of uint32 words by the factors of their places, which
    begin at `place`, and add them up."""
    low = _byte_product(word, place, 0) + _byte_product(word, place, 1)
    return low + _byte_product(word, place, 2) + _byte_product(word, place, 3)


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
    """Sum the 64-bit words of K or V of heads of slots and layers: [cells]."""
    at = tl.load(layers + layer) if SCATTERED else layer * layers
    at = words + at + slot * slot_stride + head * SIZE
    word = tl.arange(0, PADDED)
    inside = mask[:, None] & (word < SIZE)[None, :]
    loaded = tl.load(at[:, None] + word[None, :], mask=inside, other=0)
    place = FIRST + 8 * word[None, :]
    sums = sum_bytes(loaded.to(tl.uint32), place)
    sums += sum_bytes((loaded >> 32).to(tl.uint32), place + 4)
    return tl.sum(sums, axis=1)


@triton.jit
def _spread(x, STEP: tl.constexpr):
    """Repeat each of [N] STEP times: [N * STEP]."""
    N: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, None], (N, STEP)), (N * STEP,))


@triton.jit
def _sum_heads(data, slots, cell, inside, HASHING: tl.constexpr):
    """Sum heads of slots by their number: uint32 [cells]."""
    HEADS: tl.constexpr = HASHING.heads
    # Past the end, use the last layer, which has a place.
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
    """Store this program's share of the sums of the heads of slots [N]."""
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
    """Return `head_sums.whole_sums` of the bytes in slots [N], and of the recorded
    sums."""
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
