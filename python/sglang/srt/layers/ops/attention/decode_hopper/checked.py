"""Checksums of the bytes that decode attention on Hopper has in shared memory.

`decode_checked` in Gluon. A tile of K and V that was copied for the products is read
once more, as bytes, and multiplied by the digits of their factors in int8 products of
the matrix unit (`kv_canary.head_sums`):

    columns of the digits   0    1     2     3        4    5     6     7
    of the factors of       K    K     K     K        V    V     V     V
    weight of the product   1   2^8  2^16  2^24       1   2^8  2^16  2^24

The sum of a slot's products is compared with the recorded sum, which is loaded one tile
ahead. Only a program that saw a difference looks again, element by element.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kv_canary.kernels.triton.hash import POISON, pack_word0
from kv_canary.kernels.triton.report import ENTRY_WORDS, RingFinding
from kv_canary.kernels.triton.sums import V_PLACE, byte_factors, sum_bytes
from sglang.srt.layers.ops.attention.decode.checked import (
    LAYER_SHIFT,
    LINEAGE_WORD,
    NAMED_WORD,
    PLACE_SHIFT,
    REAL_KV,
    RECORD_WORDS,
    REHASHED,
    WORD3,
    passing_finding,
)
from sglang.srt.layers.ops.attention.decode_hopper.operands import tile_layout
from sglang.srt.layers.ops.attention.decode_hopper.reads import load_slots

# Digits of one factor, and of the factors of K and V together.
_DIGITS = gl.constexpr(4)
_COLUMNS = gl.constexpr(8)
# Added to a factor, it turns digits of 0 .. 255 into digits of -128 .. 127, plus 128.
_BALANCE = gl.constexpr(0x80808080)


class Watch(NamedTuple):
    """The comparison of a split while it walks the tiles.

    Fields:
        digits: int8 [bytes of a head, 8], operand of the products.
        limit: first element that is not compared.
        kept: uint32 [N], recorded sums of the elements of the next tile.
        changed: uint32 [N], bits in which sums of earlier tiles differed.
    """

    digits: Any
    limit: Any
    kept: Any
    changed: Any


@gluon.constexpr_function
def sums_layout(warps):
    """Return the layout of int8 products: elements by columns of digits."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, _COLUMNS.value])


@gluon.jit
def factor_digits(BYTES: gl.constexpr, LAYOUT: gl.constexpr):
    """Return digits of the factors of K's and V's bytes, as an operand of LAYOUT's
    parent."""
    ROWS: gl.constexpr = gl.BlockedLayout(
        [1, _COLUMNS], [32, 1], [gl.num_warps(), 1], [1, 0]
    )
    byte = gl.expand_dims(gl.arange(0, BYTES, layout=gl.SliceLayout(1, ROWS)), 1)
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, ROWS))
    column = gl.expand_dims(column, 0)
    factor = byte_factors(byte + column // _DIGITS * V_PLACE) + _BALANCE
    digit = (factor >> (8 * (column % _DIGITS)).to(gl.uint32)) ^ 0x80
    return gl.convert_layout(digit.to(gl.int8), LAYOUT)


@gluon.jit
def start_watch(
    reads, begin, of, SHAPE: gl.constexpr, WORDS: gl.constexpr, N: gl.constexpr
):
    """Return the `Watch` before the first tile, which begins at element `begin`.
    WORDS: of 16 bits, of a head."""
    SUMS: gl.constexpr = sums_layout(gl.num_warps())
    check, row, _, _ = of
    prefix = gl.load(check.prefix_lens + row).to(gl.int32)
    # A padded row has no prefix.
    prefix = gl.where(gl.load(check.req_rows + row) != 0, prefix, 0)
    limit = gl.minimum(reads.end, prefix)
    element = tile_elements(begin, N)
    slot = load_slots(reads, element, SHAPE.page_size)
    return Watch(
        digits=factor_digits(2 * WORDS, gl.DotOperandLayout(1, SUMS, 4)),
        limit=limit,
        kept=load_kept(slot, element < limit, of, SHAPE),
        changed=gl.zeros([N], gl.uint32, gl.SliceLayout(1, SUMS)),
    )


@gluon.jit
def tile_elements(begin, N: gl.constexpr):
    """Return elements [N] of the tile that begins at `begin`."""
    ROWS: gl.constexpr = gl.SliceLayout(1, sums_layout(gl.num_warps()))
    return begin + gl.arange(0, N, layout=ROWS)


@gluon.jit
def load_kept(slot, mask, of, SHAPE: gl.constexpr):
    """Load the recorded sums of slots [N], uint32; 0 if none is due."""
    at = of.check.sums + slot.to(gl.int64) * of.check.slot_stride
    kept = gl.load(at + (of.layer * SHAPE.kv_heads + of.kv_head), mask=mask, other=0)
    return kept.to(gl.uint32, bitcast=True)


@gluon.jit
def byte_products(place, digits):
    """Multiply the bytes of a tile in shared memory by digits: int32 [elements,
    columns]."""
    N: gl.constexpr = place.shape[0]
    BYTES: gl.constexpr = digits.shape[0]
    SUMS: gl.constexpr = digits.type.layout.parent
    SHARED: gl.constexpr = tile_layout(BYTES // 2, 1)
    data = place._reinterpret(gl.int8, [N, BYTES], SHARED)
    data = data.load(gl.DotOperandLayout(0, SUMS, 4))
    return mma_v2(data, digits, gl.zeros([N, _COLUMNS], gl.int32, SUMS))


@gluon.jit
def watch_tile(watch, keys, values, begin, next_slot, of, SHAPE: gl.constexpr):
    """Return the `Watch` after a tile of K and V in shared memory that begins at
    element `begin`. `next_slot` [N] holds the slots of the next tile."""
    digits, limit, kept, changed = watch
    SUMS: gl.constexpr = digits.type.layout.parent
    N: gl.constexpr = keys.shape[0]
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, SUMS))
    column = gl.expand_dims(column, 0)
    products = gl.where(
        column < _DIGITS, byte_products(keys, digits), byte_products(values, digits)
    ).to(gl.uint32, bitcast=True)
    sums = gl.sum(products << (8 * (column % _DIGITS)).to(gl.uint32), 1)
    element = tile_elements(begin, N)
    changed = changed | gl.where(element < limit, sums ^ kept, 0)
    kept = load_kept(next_slot, element + N < limit, of, SHAPE)
    return Watch(digits, limit, kept, changed)


@gluon.jit
def end_watch(
    watch,
    reads,
    begin,
    of,
    SHAPE: gl.constexpr,
    WORDS: gl.constexpr,
    IN_TURN: gl.constexpr,
):
    """Count the elements that were compared, and look again if any sum differed. All
    warps take the same branch. IN_TURN: no other layer of the forward compares."""
    count = gl.maximum(watch.limit - begin, 0)
    # In one layer of a forward, for one head.
    if (gl.program_id(0) == 0) & (IN_TURN | (of.layer == 0)):
        gl.atomic_add(of.check.state.counters + REHASHED, count.to(gl.int64))
    if gl.max((watch.changed != 0).to(gl.int32), 0) != 0:
        report_changed(reads, begin, watch.limit, of, SHAPE, WORDS // 2)


@gluon.jit
def agreed(at, lane):
    """Load the word at a pointer once for all threads, because warps drift apart."""
    return gl.sum(gl.load(at + lane * 0, mask=lane == 0, other=0), 0)


@gluon.jit
def report_changed(reads, begin, limit, of, SHAPE: gl.constexpr, WORDS: gl.constexpr):
    """`decode_checked.report_changed`, one element at a time. WORDS: of 32 bits, of a
    head."""
    # At least as many lanes as threads, so that no two warps load the same word.
    LANES: gl.constexpr = max(WORDS, 32 * gl.num_warps())
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, LANES, layout=LINE)
    is_word = lane < WORDS
    check, row, layer, kv_head = of
    k_words = reads.k.to(gl.pointer_type(gl.uint32), bitcast=True)
    v_words = reads.v.to(gl.pointer_type(gl.uint32), bitcast=True)
    clock = agreed(check.state.clock, lane)
    req = agreed(check.req_rows + row, lane)
    serial = agreed(check.serials + row, lane)
    is_flagged = (agreed(check.state.verdict + req, lane) & REAL_KV) != 0
    first = clock * 0
    if check.first_position is not None:
        first = agreed(check.first_position + row, lane)
    place = ((layer << LAYER_SHIFT) | kv_head).to(gl.int64) << PLACE_SHIFT
    sums = check.sums + (layer * SHAPE.kv_heads + kv_head)
    seen = begin * 0
    for element in range(begin, limit):
        column = (element // SHAPE.page_size).to(gl.int64)
        page = agreed(reads.table + column * reads.column_stride, lane)
        number = (page + element % SHAPE.page_size).to(gl.int64)
        k = gl.load(
            k_words + number * (reads.k_stride // 2) + lane, mask=is_word, other=0
        )
        v = gl.load(
            v_words + number * (reads.v_stride // 2) + lane, mask=is_word, other=0
        )
        found = sum_bytes(k, 4 * lane) + sum_bytes(v, 4 * lane + V_PLACE)
        computed = gl.sum(found, 0)
        kept = agreed(sums + number * check.slot_stride, lane)
        kept = kept.to(gl.uint32, bitcast=True)
        if computed != kept:
            seen += 1
            record = check.state.tail + number * RECORD_WORDS
            word0 = agreed(record, lane)
            if word0 != POISON:
                head = check.state.head + number * RECORD_WORDS
                named = gl.atomic_xchg(head + NAMED_WORD, clock)
                if (named != clock) | (is_flagged == 0):
                    lineage = agreed(record + LINEAGE_WORD, lane)
                    position = first + element
                    finding = RingFinding(
                        reasons=REAL_KV,
                        req_row=req,
                        serial=serial,
                        slot=number,
                        position=position,
                        expected_word0=pack_word0(position * 0 - 1, position),
                        found_word0=word0,
                        expected_lineage=lineage,
                        found_lineage=lineage,
                        found_word3=agreed(record + WORD3, lane),
                        clock=clock,
                        batch_row=row,
                        expected_slot=number,
                        found_fingerprint=place | kept.to(gl.int64),
                        computed_fingerprint=place | computed.to(gl.int64),
                        tag=check.tag,
                    )
                    append(check.state, finding, lane)
    if seen == 0:
        passing = passing_finding(of, first + begin, req, serial, clock, place)
        append(check.state, passing, lane)


@gluon.jit
def append(state, finding, lane):
    """The canary kernels' `report_one`."""
    place = gl.atomic_add(state.ring_count, 1)
    entry = lane.to(gl.int64) * 0
    for word in gl.static_range(ENTRY_WORDS):
        if finding[word] is not None:
            entry = gl.where(lane == word, finding[word], entry)
    keep = (lane < ENTRY_WORDS) & (place < state.capacity)
    gl.store(state.ring + place * ENTRY_WORDS + lane, entry, mask=keep)
    gl.atomic_or(state.verdict + finding.req_row, finding.reasons)
