"""Hashes of the canary's Triton kernels: packed words, lineage terms, fingerprints.

Mirrors `records.py`. Hashing is unsigned; words are kept as int64. `data` and HASHING
are tuples from `args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary import records
from kv_canary.layout import FingerprintMode

MUL_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MUL_2 = tl.constexpr(0x94D049BB133111EB)
LOW_HALF = tl.constexpr(records.TOKEN_MASK)
SERIAL_BITS = tl.constexpr(records.SERIAL_BITS)
SERIAL_MASK = tl.constexpr(records.SERIAL_MASK)
CLOCK_MASK = tl.constexpr(records.CLOCK_MASK)
CLOCK_SHIFT = tl.constexpr(records.CLOCK_SHIFT)
POISON = tl.constexpr(records.POISON_WORD)
SENTINEL = tl.constexpr(records.SENTINEL)
FILL_TILE = tl.constexpr(1024)
NONE, PARTIAL, ROTATE, ALL = (tl.constexpr(int(mode)) for mode in FingerprintMode)


@triton.jit
def mix64(x):
    word = x.to(tl.uint64, bitcast=True)
    word = (word ^ (word >> 30)) * MUL_1
    word = (word ^ (word >> 27)) * MUL_2
    return (word ^ (word >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def pack_word0(token, position):
    return (position << 32) | (token & LOW_HALF)


@triton.jit
def pack_word3(clock, kind, serial):
    return (clock << CLOCK_SHIFT) | (kind << SERIAL_BITS) | (serial & SERIAL_MASK)


@triton.jit
def lineage_term(word0, salt):
    """Return the lineage term of a packed word 0; `salt` is mix64(salt ^ SALT_KEY)."""
    return mix64(mix64(word0) ^ salt)


@triton.jit
def _layer_at(layers, layer, SCATTERED: tl.constexpr):
    """Return the words from the first layer to `layer`: a table entry if SCATTERED,
    otherwise layers are `layers` words apart."""
    return tl.load(layers + layer) if SCATTERED else layer * layers


@triton.jit
def _slot_at(slot, slot_stride, page_gap, PAGE: tl.constexpr):
    """Return the words from slot 0 to slots. After each PAGE slots there are `page_gap`
    more words than the slots fill; PAGE 0: nowhere."""
    at = slot * slot_stride
    if PAGE > 0:
        at += slot // PAGE * page_gap
    return at


@triton.jit
def _word_at(word, run_gap, RUN: tl.constexpr):
    """Return the place of words in a slot. After each RUN words there are `run_gap` of
    other slots; RUN 0: nowhere."""
    at = word
    if RUN > 0:
        at += word // RUN * run_gap
    return at


@triton.jit
def _sum_sample(
    words,
    slot_at,
    mask,
    layer,
    chunk,
    layers,
    run_gap,
    SCATTERED: tl.constexpr,
    RUN: tl.constexpr,
):
    """Sum the two hashed words of a 16-byte chunk; only the low 32 bits count."""
    at = words + _layer_at(layers, layer, SCATTERED) + slot_at
    at += _word_at(2 * chunk, run_gap, RUN)
    key = (layer << 32) | (2 * chunk)
    first = tl.load(at, mask=mask, other=0)
    second = tl.load(at + 1, mask=mask, other=0)
    return mix64(first ^ mix64(key)) + mix64(second ^ mix64(key + 1))


@triton.jit
def _sum_all(
    words,
    slot_at,
    mask,
    layers,
    run_gap,
    LAYERS: tl.constexpr,
    WORDS: tl.constexpr,
    SCATTERED: tl.constexpr,
    RUN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum all hashed words of slots [N], as int64; only the low 32 bits count.

    Layers and words are one dimension in tiles of [N, CHUNK], whose keys are hashed
    once for all N slots; only the low halves are added up.
    """
    TOTAL: tl.constexpr = LAYERS * WORDS
    sums = tl.zeros([slot_at.shape[0], CHUNK], dtype=tl.int32)
    rows = words + slot_at
    for start in range(0, TOTAL, CHUNK):
        flat = start + tl.arange(0, CHUNK)
        # Past the end, use the last layer, which has a place.
        layer = tl.minimum(flat // WORDS, LAYERS - 1).to(tl.int64)
        index = (flat % WORDS).to(tl.int64)
        key = mix64((layer << 32) | index)
        inside = mask[:, None] & (flat < TOTAL)[None, :]
        offset = _layer_at(layers, layer, SCATTERED) + _word_at(index, run_gap, RUN)
        at = rows[:, None] + offset[None, :]
        word = tl.load(at, mask=inside, other=0)
        hashed = mix64(word ^ key[None, :]).to(tl.int32)
        sums += tl.where(inside, hashed, 0)
    return tl.sum(sums, axis=1).to(tl.int64)


@triton.jit
def _fill(
    words,
    slot_at,
    mask,
    layers,
    run_gap,
    LAYERS: tl.constexpr,
    WORDS: tl.constexpr,
    SCATTERED: tl.constexpr,
    RUN: tl.constexpr,
):
    TOTAL: tl.constexpr = LAYERS * WORDS
    CHUNK: tl.constexpr = FILL_TILE // slot_at.shape[0]
    rows = words + slot_at
    for start in range(0, TOTAL, CHUNK):
        flat = start + tl.arange(0, CHUNK)
        layer = tl.minimum(flat // WORDS, LAYERS - 1).to(tl.int64)
        offset = _layer_at(layers, layer, SCATTERED)
        offset += _word_at(flat % WORDS, run_gap, RUN)
        inside = mask[:, None] & (flat < TOTAL)[None, :]
        at = rows[:, None] + offset[None, :]
        tl.store(at, tl.zeros_like(at.to(tl.int64)) + SENTINEL, mask=inside)


@triton.jit
def fill_sentinel(data, slot, mask, HASHING: tl.constexpr):
    """Fill K and V of slots [N], at most FILL_TILE, so that a missing store shows."""
    _fill(
        data.k_words,
        _slot_at(slot, data.k_slot_stride, data.page_gap, HASHING.page),
        mask,
        data.k_layers,
        data.run_gap,
        LAYERS=HASHING.layers,
        WORDS=HASHING.k_words,
        SCATTERED=HASHING.scattered,
        RUN=HASHING.run,
    )
    _fill(
        data.v_words,
        _slot_at(slot, data.v_slot_stride, data.page_gap, HASHING.page),
        mask,
        data.v_layers,
        data.run_gap,
        LAYERS=HASHING.layers,
        WORDS=HASHING.v_words,
        SCATTERED=HASHING.scattered,
        RUN=HASHING.run,
    )


@triton.jit
def _holds_sentinel(at, mask, last):
    first = tl.load(at, mask=mask, other=0) == SENTINEL
    return first | (tl.load(at + last, mask=mask, other=0) == SENTINEL)


@triton.jit
def has_sentinel(data, slot, mask, HASHING: tl.constexpr):
    """Return whether the first or last word of slots [N], in K or V of some layer, is
    still the sentinel."""
    # All layers at once, because one after the other their latencies would add up.
    number = tl.arange(0, HASHING.layer_block)
    inside = mask[:, None] & (number < HASHING.layers)[None, :]
    layer = tl.minimum(number, HASHING.layers - 1).to(tl.int64)
    k = data.k_words + _layer_at(data.k_layers, layer, HASHING.scattered)
    slot_at = _slot_at(slot, data.k_slot_stride, data.page_gap, HASHING.page)
    at = k[None, :] + slot_at[:, None]
    last = _word_at(HASHING.k_words - 1, data.run_gap, HASHING.run)
    found = _holds_sentinel(at, inside, last)
    v = data.v_words + _layer_at(data.v_layers, layer, HASHING.scattered)
    slot_at = _slot_at(slot, data.v_slot_stride, data.page_gap, HASHING.page)
    at = v[None, :] + slot_at[:, None]
    last = _word_at(HASHING.v_words - 1, data.run_gap, HASHING.run)
    found = found | _holds_sentinel(at, inside, last)
    return tl.max((found & inside).to(tl.int32), axis=1) != 0


@triton.jit
def fingerprint(data, slot, mask, lineage, HASHING: tl.constexpr):
    """Return fingerprints [N] of slots [N] with these lineages, 0 outside `mask`. The
    mode must not be NONE."""
    k_at = _slot_at(slot, data.k_slot_stride, data.page_gap, HASHING.page)
    v_at = _slot_at(slot, data.v_slot_stride, data.page_gap, HASHING.page)
    if HASHING.mode == PARTIAL:
        # Multiply and shift: a place in 0 .. n - 1 without a division.
        spread = mix64(lineage)
        low, high = spread & LOW_HALF, (spread >> 32) & LOW_HALF
        layer = (low * HASHING.layers) >> 32
        k = _sum_sample(
            data.k_words,
            k_at,
            mask,
            layer,
            chunk=(high * (HASHING.k_words // 2)) >> 32,
            layers=data.k_layers,
            run_gap=data.run_gap,
            SCATTERED=HASHING.scattered,
            RUN=HASHING.run,
        )
        v = _sum_sample(
            data.v_words,
            v_at,
            mask,
            layer,
            chunk=(high * (HASHING.v_words // 2)) >> 32,
            layers=data.v_layers,
            run_gap=data.run_gap,
            SCATTERED=HASHING.scattered,
            RUN=HASHING.run,
        )
    else:
        k = _sum_all(
            data.k_words,
            k_at,
            mask,
            layers=data.k_layers,
            run_gap=data.run_gap,
            LAYERS=HASHING.layers,
            WORDS=HASHING.k_words,
            SCATTERED=HASHING.scattered,
            RUN=HASHING.run,
            CHUNK=HASHING.chunk,
        )
        v = _sum_all(
            data.v_words,
            v_at,
            mask,
            layers=data.v_layers,
            run_gap=data.run_gap,
            LAYERS=HASHING.layers,
            WORDS=HASHING.v_words,
            SCATTERED=HASHING.scattered,
            RUN=HASHING.run,
            CHUNK=HASHING.chunk,
        )
    return tl.where(mask, (k & LOW_HALF) | (v << 32), 0)
