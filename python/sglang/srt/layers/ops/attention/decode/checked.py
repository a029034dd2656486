"""Decode attention that compares the bytes it loads with their recorded checksums.

A program holds K and V of its elements in registers anyway. It adds up their bytes,
each times its factor (`kv_canary.head_sums`), subtracts the recorded sums of these
slots, and is done if nothing is left: per slot it loads 4 bytes more than attention
does. Each slot counts with its own odd factor, so that no two errors cancel. If
something is left, the program looks again, slot by slot, and reports. `check` is the
`Check` of `args`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kv_canary import records
from kv_canary.checks import Reason
from kv_canary.kernels.triton.hash import POISON, pack_word0
from kv_canary.kernels.triton.report import (
    RingFinding,
    agree_across_warps,
    report,
    report_one,
)
from kv_canary.kernels.triton.sums import (
    V_PLACE,
    slot_factors,
    sum_bytes,
)
from sglang.srt.layers.ops.attention.shared.attend import Sums, weights_of_read
from sglang.srt.layers.ops.attention.shared.elements import page_at, page_to_slots
from sglang.srt.layers.ops.stored_kv import read_value

# Words of a tile that each thread adds up: one 16-byte load.
LANE_WORDS = tl.constexpr(4)
REAL_KV = tl.constexpr(int(Reason.VERIFY_REAL_KV))
LINEAGE_WORD = tl.constexpr(int(records.Record.LINEAGE))
WORD3 = tl.constexpr(int(records.Record.WORD3))
REHASHED = tl.constexpr(int(records.Counter.REHASHED_SLOTS))
NAMED_WORD = tl.constexpr(int(records.Record.FINGERPRINT))
RECORD_WORDS = tl.constexpr(records.RECORD_WORDS)
PLACE_SHIFT = tl.constexpr(records.HALF_BITS)
LAYER_SHIFT = tl.constexpr(records.PLACE_LAYER_SHIFT)


class Compared(NamedTuple):
    """One KV head of a layer, as a row reads it, and the `Check` of its bytes."""

    check: Any
    row: Any
    layer: Any
    kv_head: Any


@triton.jit
def as_words(tile):
    """Return the 32-bit words of a tile [elements, channels]: uint32 [elements,
    words]."""
    if tile.dtype.primitive_bitwidth == 32:
        return tile.to(tl.uint32, bitcast=True)
    else:
        # The compiler finds that these are the registers that hold the loaded tile.
        if tile.dtype.primitive_bitwidth == 8:
            halves = _joined(tile.to(tl.uint8, bitcast=True), tl.uint16)
        else:
            halves = tile.to(tl.uint16, bitcast=True)
        return _joined(halves, tl.uint32)


@triton.jit
def _joined(parts, dtype: tl.constexpr):
    """Return pairs of neighbouring columns, the low halves first, as `dtype`."""
    pairs = tl.reshape(parts, (parts.shape[0], parts.shape[1] // 2, 2))
    low, high = tl.split(pairs)
    return low.to(dtype) | (high.to(dtype) << parts.dtype.primitive_bitwidth)


@triton.jit
def lane_sums(k, v):
    """Sum the bytes of K and V of each element, uint32 [elements, words /
    LANE_WORDS]."""
    WORDS: tl.constexpr = k.shape[1] * k.dtype.primitive_bitwidth // 32
    place = 4 * tl.arange(0, WORDS)[None, :]
    sums = sum_bytes(as_words(k), place) + sum_bytes(as_words(v), place + V_PLACE)
    lanes = tl.reshape(sums, (k.shape[0], WORDS // LANE_WORDS, LANE_WORDS))
    return tl.sum(lanes, 2)


@triton.jit
def load_kept(check, slot, layer, kv_head, mask, KV_HEADS: tl.constexpr):
    """Load the recorded sums of a head for slots [N], uint32."""
    at = check.sums + slot.to(tl.int64) * check.slot_stride
    kept = tl.load(at + (layer * KV_HEADS + kv_head), mask=mask, other=0)
    return kept.to(tl.uint32, bitcast=True)


@triton.jit
def passing_finding(of, position, req, serial, clock, place):
    """Report bytes that were wrong when a program first loaded them and are right in
    memory now. The program began at `position` and finds nothing on its second look."""
    return RingFinding(
        reasons=REAL_KV,
        req_row=req,
        serial=serial,
        slot=-1,
        position=position,
        expected_word0=pack_word0(position * 0 - 1, position),
        found_word0=0,
        expected_lineage=0,
        found_lineage=0,
        found_word3=0,
        clock=clock,
        batch_row=of.row,
        expected_slot=-1,
        found_fingerprint=place,
        computed_fingerprint=place,
        tag=of.check.tag,
    )


@triton.jit
def report_changed(begin, end, kv, of, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Report elements in [begin, end) whose bytes no longer match their checksum. A
    slot is named once per forward, whatever differs in it, and once more by each row
    without a finding so far. Slots without a record don't count; verify reports
    them."""
    BLOCK_N: tl.constexpr = TILE.block_n
    check, row, layer, kv_head = of
    clock = tl.load(check.state.clock)
    req = tl.load(check.req_rows + row)
    serial = tl.load(check.serials + row)
    is_flagged = (tl.load(check.state.verdict + req) & REAL_KV) != 0
    first = row * 0
    if check.first_position is not None:
        first = tl.load(check.first_position + row)
    place = ((layer << LAYER_SHIFT) | kv_head).to(tl.int64) << PLACE_SHIFT
    seen = begin * 0
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        element = start + tl.arange(0, BLOCK_N)
        is_read = element < end
        page = tl.load(page_at(kv, element, SHAPE.page_size), mask=is_read, other=0)
        slot = page_to_slots(page, element, SHAPE.page_size)
        is_loaded = is_read[:, None] & kv.is_channel[None, :]
        k = tl.load(kv.k + slot * kv.k_stride, mask=is_loaded, other=0.0)
        v = tl.load(kv.v + slot * kv.v_stride, mask=is_loaded, other=0.0)
        number = (page + element % SHAPE.page_size).to(tl.int64)
        computed = tl.sum(lane_sums(k, v), 1)
        kept = load_kept(check, number, layer, kv_head, is_read, SHAPE.kv_heads)
        changed = is_read & (computed != kept)
        seen += tl.sum(changed.to(tl.int32), 0)
        record = check.state.tail + number * RECORD_WORDS
        word0 = tl.load(record, mask=changed, other=POISON)
        lineage = tl.load(record + LINEAGE_WORD, mask=changed, other=0)
        word3 = tl.load(record + WORD3, mask=changed, other=0)
        sound = changed & (word0 != POISON)
        named = tl.atomic_xchg(
            check.state.head + number * RECORD_WORDS + NAMED_WORD,
            tl.zeros_like(number) + clock,
            mask=sound,
        )
        is_due = sound & ((named != clock) | (is_flagged == 0))
        position = first + element.to(tl.int64)
        finding = RingFinding(
            reasons=agree_across_warps(tl.where(is_due, REAL_KV, 0).to(tl.int64)),
            req_row=req,
            serial=serial,
            slot=number,
            position=position,
            expected_word0=pack_word0(tl.zeros_like(position) - 1, position),
            found_word0=word0,
            expected_lineage=lineage,
            found_lineage=lineage,
            found_word3=word3,
            clock=clock,
            batch_row=row,
            expected_slot=number,
            found_fingerprint=place | kept.to(tl.int64),
            computed_fingerprint=place | computed.to(tl.int64),
            tag=check.tag,
        )
        report(check.state, finding)
    if seen == 0:
        passing = passing_finding(of, first + begin, req, serial, clock, place)
        report_one(check.state, passing)


@triton.jit
def attend_checked(
    sums,
    query,
    begin,
    end,
    kv,
    scale,
    of,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    IN_TURN: tl.constexpr,
):
    """Like `attend_range`, and report elements of the prefix whose bytes no longer
    match their checksum. IN_TURN: no other layer of the forward compares."""
    acc, top, total = sums
    check, row, layer, kv_head = of
    BLOCK_N: tl.constexpr = TILE.block_n
    # Words of a head, padded.
    BLOCK_W: tl.constexpr = (
        SHAPE.block_d * kv.k.dtype.element_ty.primitive_bitwidth // 32
    )
    prefix = tl.load(check.prefix_lens + row).to(tl.int32)
    # A padded row has no prefix.
    prefix = tl.where(tl.load(check.req_rows + row) != 0, prefix, 0)
    last = tl.minimum(end, prefix)
    # In one layer of a forward, for one head.
    if (tl.program_id(0) == 0) & (IN_TURN | (layer == 0)) & (last > begin):
        count = (last - begin).to(tl.int64)
        tl.atomic_add(check.state.counters + REHASHED, count)
    found = tl.zeros([BLOCK_N, BLOCK_W // LANE_WORDS], tl.uint32)
    kept = tl.zeros([BLOCK_N], tl.uint32)
    for start in range(begin, end, BLOCK_N):
        element = start + tl.arange(0, BLOCK_N)
        is_read = element < end
        is_kept = element < prefix
        page = tl.load(page_at(kv, element, SHAPE.page_size), mask=is_read, other=0)
        slot = page_to_slots(page, element, SHAPE.page_size)
        is_loaded = is_read[:, None] & kv.is_channel[None, :]
        k = tl.load(kv.k + slot * kv.k_stride, mask=is_loaded, other=0.0)
        v = tl.load(kv.v + slot * kv.v_stride, mask=is_loaded, other=0.0)
        number = page + element % SHAPE.page_size
        factor = tl.where(is_kept, slot_factors(number), 0)
        found += lane_sums(k, v) * factor[:, None]
        kept += factor * load_kept(
            check, number, layer, kv_head, is_kept, SHAPE.kv_heads
        )
        k = read_value(k, query.dtype)
        weight, shrink, top = weights_of_read(query, k, is_read, top, scale)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        v = read_value(v, query.dtype)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    # Reload through all warps, because they have to take the same branch.
    is_first = (tl.arange(0, BLOCK_W // LANE_WORDS) == 0)[None, :]
    left = found - tl.where(is_first, kept[:, None], 0)
    if tl.sum(tl.sum(left, 1), 0) != 0:
        report_changed(begin, last, kv, of, SHAPE, TILE)
    return Sums(acc, top, total)
