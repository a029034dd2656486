"""Bytes that decode attention on Hopper has in shared memory, compared with kept sums.

`decode_checked` in Gluon. A tile of K and V that was copied for the products is read
once more, as 32-bit words; their folded products (`kv_canary.head_sums`) are added up
slot by slot, and compared with the sums kept of these slots, which are loaded one tile
ahead. Only a program that saw a difference looks again, element by element.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kv_canary.kernels.triton_hash import POISON, pack_word0
from kv_canary.kernels.triton_report import ENTRY_WORDS, Finding
from kv_canary.kernels.triton_sums import V_PLACE, fold_products, word_factors
from sglang.srt.layers.attention.triton_ops.decode_checked import (
    LAYER_SHIFT,
    LINEAGE_WORD,
    NAMED_WORD,
    PLACE_SHIFT,
    REAL_KV,
    RECORD_WORDS,
    REHASHED,
    WORD3,
)
from sglang.srt.layers.attention.triton_ops.decode_hopper_reads import slots_of


class Watch(NamedTuple):
    """The comparison of a split on its way through the tiles.

    Fields:
        limit: element after the last that is compared.
        changed: uint32 [N], bits in which sums of the tiles before differed.
        k_factors, v_factors: uint32 [1, words] of a head's words.
    """

    limit: Any
    changed: Any
    k_factors: Any
    v_factors: Any


@gluon.constexpr_function
def word_layout(copy):
    """The layout of a tile's 32-bit words, each thread's those that it copied."""
    return gl.BlockedLayout(
        [1, copy.size_per_thread[1] // 2],
        copy.threads_per_warp,
        copy.warps_per_cta,
        copy.order,
    )


@gluon.jit
def factors_of(kv_head, first_place, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Factors of the words of K or of V of a head, uint32."""
    WORDS: gl.constexpr = SHAPE.head_dim // 2
    return word_factors(
        first_place + kv_head * WORDS + gl.arange(0, WORDS, layout=LAYOUT)
    )


@gluon.jit
def start_watch(reads, of, SHAPE: gl.constexpr, N: gl.constexpr, COPY: gl.constexpr):
    """The `Watch` before the first tile."""
    WORDS: gl.constexpr = word_layout(COPY)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, WORDS)
    check, row, _, kv_head = of
    prefix = gl.load(check.prefix_lens + row).to(gl.int32)
    # A padded row has no prefix.
    prefix = gl.where(gl.load(check.req_rows + row) != 0, prefix, 0)
    return Watch(
        limit=gl.minimum(reads.end, prefix),
        changed=gl.zeros([N], gl.uint32, gl.SliceLayout(1, WORDS)),
        k_factors=gl.expand_dims(factors_of(kv_head, 0, SHAPE, COLUMNS), 0),
        v_factors=gl.expand_dims(factors_of(kv_head, V_PLACE, SHAPE, COLUMNS), 0),
    )


@gluon.jit
def elements_of(start, N: gl.constexpr, COPY: gl.constexpr):
    """Elements [N] of the tile that begins at `start`."""
    ROWS: gl.constexpr = gl.SliceLayout(1, word_layout(COPY))
    return start + gl.arange(0, N, layout=ROWS)


@gluon.jit
def load_kept(
    reads,
    watch,
    start,
    N: gl.constexpr,
    of,
    SHAPE: gl.constexpr,
    COPY: gl.constexpr,
):
    """The sums kept of the elements of a tile, uint32 [N]; 0 where none is due."""
    element = elements_of(start, N, COPY)
    slot = slots_of(reads, element, SHAPE.page_size).to(gl.int64)
    at = of.check.sums + slot * of.check.slot_stride
    at += of.layer * SHAPE.kv_heads + of.kv_head
    kept = gl.load(at, mask=element < watch.limit, other=0)
    return kept.to(gl.uint32, bitcast=True)


@gluon.jit
def products_of(place, factors, WORDS: gl.constexpr):
    """Folded products of the words of a tile in shared memory, uint32."""
    N: gl.constexpr = place.shape[0]
    D: gl.constexpr = place.shape[1]
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    words = place._reinterpret(gl.uint32, [N, D // 2], SHARED)
    return fold_products(words.load(WORDS), factors)


@gluon.jit
def watch_tile(watch, keys, values, kept, start, COPY: gl.constexpr):
    """The `Watch` after a tile of K and V in shared memory that begins at `start`."""
    WORDS: gl.constexpr = word_layout(COPY)
    limit, changed, k_factors, v_factors = watch
    products = products_of(keys, k_factors, WORDS)
    products += products_of(values, v_factors, WORDS)
    element = elements_of(start, keys.shape[0], COPY)
    differs = gl.sum(products, 1) ^ kept
    changed = changed | gl.where(element < limit, differs, 0)
    return Watch(limit, changed, k_factors, v_factors)


@gluon.jit
def end_watch(watch, reads, begin, of, SHAPE: gl.constexpr, IN_TURN: gl.constexpr):
    """Count the elements that were compared, and look again if any sum differed; all
    warps take the same branch. IN_TURN: no other layer of the forward compares."""
    count = gl.maximum(watch.limit - begin, 0)
    # In one layer of a forward, for one head.
    if (gl.program_id(0) == 0) & (IN_TURN | (of.layer == 0)):
        gl.atomic_add(of.check.state.counters + REHASHED, count.to(gl.int64))
    if gl.max((watch.changed != 0).to(gl.int32), 0) != 0:
        report_changed(reads, begin, watch.limit, of, SHAPE)


@gluon.jit
def agreed(at, lane):
    """The word at a pointer, as one thread sees it: warps run apart."""
    return gl.sum(gl.load(at + lane * 0, mask=lane == 0, other=0), 0)


@gluon.jit
def report_changed(reads, begin, limit, of, SHAPE: gl.constexpr):
    """`decode_checked.report_changed`, one element after the other."""
    WORDS: gl.constexpr = SHAPE.head_dim // 2
    # No fewer lanes than threads, so that no two warps load the same word.
    LANES: gl.constexpr = max(WORDS, 32 * gl.num_warps())
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, LANES, layout=LINE)
    is_word = lane < WORDS
    check, row, layer, kv_head = of
    first_word = kv_head * WORDS + lane
    k_factors = word_factors(first_word)
    v_factors = word_factors(first_word + V_PLACE)
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
        computed = gl.sum(fold_products(k, k_factors) + fold_products(v, v_factors), 0)
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
                    finding = Finding(
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
        # The bytes that were copied were wrong; those in memory are right.
        position = first + begin
        passing = Finding(
            reasons=REAL_KV,
            req_row=req,
            serial=serial,
            slot=-1,
            position=position,
            expected_word0=pack_word0(position * 0 - 1, position),
            found_word0=0,
            expected_lineage=None,
            found_lineage=None,
            found_word3=None,
            clock=clock,
            batch_row=row,
            expected_slot=-1,
            found_fingerprint=place,
            computed_fingerprint=place,
            tag=check.tag,
        )
        append(check.state, passing, lane)


@gluon.jit
def append(state, finding, lane):
    """`triton_report.report_one`."""
    place = gl.atomic_add(state.ring_count, 1)
    entry = lane.to(gl.int64) * 0
    for word in gl.static_range(ENTRY_WORDS):
        if finding[word] is not None:
            entry = gl.where(lane == word, finding[word], entry)
    keep = (lane < ENTRY_WORDS) & (place < state.capacity)
    gl.store(state.ring + place * ENTRY_WORDS + lane, entry, mask=keep)
    gl.atomic_or(state.verdict + finding.req_row, finding.reasons)
