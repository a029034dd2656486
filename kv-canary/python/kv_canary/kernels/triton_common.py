"""What the canary's Triton kernels share: hashes, fingerprints, ring entries, phases,
and what a batch row says of itself.

Mirrors `records.py`. Hashing is unsigned; words are kept as int64. The parameters
`state`, `rows`, `table`, `data` and HASHING are the tuples of `triton_args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary import records
from kv_canary.records import Reason

MUL_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MUL_2 = tl.constexpr(0x94D049BB133111EB)
SALT_KEY = tl.constexpr(records.SALT_KEY)
LOW_HALF = tl.constexpr(records.TOKEN_MASK)
SERIAL_BITS = tl.constexpr(records.SERIAL_BITS)
SERIAL_MASK = tl.constexpr(records.SERIAL_MASK)
CLOCK_SHIFT = tl.constexpr(records.CLOCK_SHIFT)
CLOCK_MASK = tl.constexpr(records.CLOCK_MASK)
POISON = tl.constexpr(records.POISON_WORD)
RING_WORDS = tl.constexpr(records.RING_WORDS)
PHASE_REASON = tl.constexpr(int(Reason.PHASE))
MAX_THREADS = tl.constexpr(128)
NONE, PARTIAL, ROTATE, ALL = (tl.constexpr(mode) for mode in range(4))


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
def term_of(word0, salt):
    """Lineage term of a packed word 0; `salt` is mix64(salt ^ SALT_KEY)."""
    return mix64(mix64(word0) ^ salt)


@triton.jit
def _sampled(words, slot, mask, layer, chunk, layer_stride, slot_stride):
    """Sum of the two hashed words of a 16-byte chunk; low 32 bits count."""
    at = words + layer * layer_stride + slot * slot_stride + 2 * chunk
    key = (layer << 32) | (2 * chunk)
    first = tl.load(at, mask=mask, other=0)
    second = tl.load(at + 1, mask=mask, other=0)
    return mix64(first ^ mix64(key)) + mix64(second ^ mix64(key + 1))


@triton.jit
def _hashed(
    words,
    slot,
    mask,
    layer_stride,
    slot_stride,
    LAYERS: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sums of all hashed words of slots [N], as int64; low 32 bits count.

    Layers and words are one dimension in tiles of [N, CHUNK], whose keys are hashed
    once for all N slots; only the low halves are added up.
    """
    TOTAL: tl.constexpr = LAYERS * WORDS
    sums = tl.zeros([slot.shape[0], CHUNK], dtype=tl.int32)
    rows = words + slot * slot_stride
    for start in range(0, TOTAL, CHUNK):
        flat = start + tl.arange(0, CHUNK)
        layer = (flat // WORDS).to(tl.int64)
        index = (flat % WORDS).to(tl.int64)
        key = mix64((layer << 32) | index)
        inside = mask[:, None] & (flat < TOTAL)[None, :]
        at = rows[:, None] + (layer * layer_stride + index)[None, :]
        word = tl.load(at, mask=inside, other=0)
        hashed = mix64(word ^ key[None, :]).to(tl.int32)
        sums += tl.where(inside, hashed, 0)
    return tl.sum(sums, axis=1).to(tl.int64)


@triton.jit
def fingerprint_of(data, slot, mask, lineage, HASHING: tl.constexpr):
    """Fingerprints [N] of slots [N] with these lineages; 0 outside of `mask`. The mode
    is not NONE."""
    if HASHING.mode == PARTIAL:
        # Multiply and shift: a place in 0 .. n - 1 without a division.
        spread = mix64(lineage)
        low, high = spread & LOW_HALF, (spread >> 32) & LOW_HALF
        layer = (low * HASHING.layers) >> 32
        k = _sampled(
            data.k_words,
            slot,
            mask,
            layer,
            (high * (HASHING.k_words // 2)) >> 32,
            data.k_layer_stride,
            data.k_slot_stride,
        )
        v = _sampled(
            data.v_words,
            slot,
            mask,
            layer,
            (high * (HASHING.v_words // 2)) >> 32,
            data.v_layer_stride,
            data.v_slot_stride,
        )
    else:
        k = _hashed(
            data.k_words,
            slot,
            mask,
            data.k_layer_stride,
            data.k_slot_stride,
            HASHING.layers,
            HASHING.k_words,
            HASHING.chunk,
        )
        v = _hashed(
            data.v_words,
            slot,
            mask,
            data.v_layer_stride,
            data.v_slot_stride,
            HASHING.layers,
            HASHING.v_words,
            HASHING.chunk,
        )
    return tl.where(mask, (k & LOW_HALF) | (v << 32), 0)


@triton.jit
def told_to_all(reasons):
    """What the first warp found, [N], for all warps of a program of up to MAX_THREADS.

    With fewer elements than threads each warp looks at all of them, and warps run
    apart: of a record that another program is writing they may see different words. A
    branch on what each saw would have them meet at the wrong barriers. A sum over the
    warps goes through shared memory, so that they agree.
    """
    COPIES: tl.constexpr = MAX_THREADS // reasons.shape[0]
    if COPIES > 1:
        is_first = (tl.arange(0, COPIES) == 0)[:, None]
        reasons = tl.sum(tl.where(is_first, reasons[None, :], 0), axis=0)
    return reasons


@triton.jit
def report(
    state,
    reasons,
    req_row,
    serial,
    slot,
    position,
    expected_word0,
    found_word0,
    expected_lineage,
    found_lineage,
    found_word3,
    clock,
    batch_row,
    expected_slot,
    found_fingerprint,
    computed_fingerprint,
    tag,
):
    """A ring entry for each element with reasons, and a verdict on `req_row`.

    Columns are int64 [N]; `req_row`, `serial`, `clock`, `batch_row`, `tag` scalars.
    All warps have to agree on `reasons`.
    """
    bad = reasons != 0
    count = tl.sum(bad.to(tl.int32), axis=0)
    if count > 0:
        begin = tl.atomic_add(state.ring_count, count.to(tl.int64))
        place = begin + tl.cumsum(bad.to(tl.int32), axis=0) - 1
        keep = bad & (place < state.capacity)
        entry = state.ring + place * RING_WORDS
        tl.store(entry, reasons, mask=keep)
        tl.store(entry + 1, tl.zeros_like(slot) + req_row, mask=keep)
        tl.store(entry + 2, tl.zeros_like(slot) + serial, mask=keep)
        tl.store(entry + 3, slot, mask=keep)
        tl.store(entry + 4, position, mask=keep)
        tl.store(entry + 5, expected_word0, mask=keep)
        tl.store(entry + 6, found_word0, mask=keep)
        tl.store(entry + 7, expected_lineage, mask=keep)
        tl.store(entry + 8, found_lineage, mask=keep)
        tl.store(entry + 9, found_word3, mask=keep)
        tl.store(entry + 10, tl.zeros_like(slot) + clock, mask=keep)
        tl.store(entry + 11, tl.zeros_like(slot) + batch_row, mask=keep)
        tl.store(entry + 12, expected_slot, mask=keep)
        tl.store(entry + 13, found_fingerprint, mask=keep)
        tl.store(entry + 14, computed_fingerprint, mask=keep)
        tl.store(entry + 15, tl.zeros_like(slot) + tag, mask=keep)
        of_row = state.verdict + req_row + tl.zeros_like(slot)
        tl.atomic_or(of_row, reasons.to(tl.int32), mask=bad)


@triton.jit
def report_one(
    state,
    reason,
    req_row,
    serial,
    position,
    expected_word0,
    found_word0,
    clock,
    batch_row,
    tag,
):
    """One ring entry that names no slot; all scalars."""
    place = tl.atomic_add(state.ring_count, 1)
    column = tl.arange(0, RING_WORDS)
    entry = tl.zeros([RING_WORDS], dtype=tl.int64)
    entry = tl.where(column == 0, reason, entry)
    entry = tl.where(column == 1, req_row, entry)
    entry = tl.where(column == 2, serial, entry)
    entry = tl.where((column == 3) | (column == 12), -1, entry)
    entry = tl.where(column == 4, position, entry)
    entry = tl.where(column == 5, expected_word0, entry)
    entry = tl.where(column == 6, found_word0, entry)
    entry = tl.where(column == 10, clock, entry)
    entry = tl.where(column == 11, batch_row, entry)
    entry = tl.where(column == 15, tag, entry)
    keep = (column < RING_WORDS) & (place < state.capacity)
    tl.store(state.ring + place * RING_WORDS + column, entry, mask=keep)
    tl.atomic_or(state.verdict + req_row, reason)


@triton.jit
def step_phase(state, manager, clock, tag, DUE: tl.constexpr, NEXT: tl.constexpr):
    """Take the manager's phase from DUE to NEXT; a breach is reported and repaired."""
    if manager >= 0:
        found = tl.load(state.phase + manager)
        # Warps run apart: one that came here after the store below would take the
        # branch alone, and meet the others at the wrong barriers from then on.
        tl.debug_barrier()
        if found != DUE:
            found0 = found.to(tl.int64)
            report_one(state, PHASE_REASON, 0, 0, -1, DUE, found0, clock, -1, tag)
        tl.store(state.phase + manager, NEXT)


@triton.jit
def start_of(rows, row, live):
    """Where the row's new tokens start."""
    start = row
    if rows.qo_indptr is not None:
        start = tl.load(rows.qo_indptr + row, mask=live, other=0)
    return start


@triton.jit
def salt_of(rows, row, live):
    """The salt of the row's lineages, as `term_of` takes it."""
    return mix64(tl.load(rows.salts + row, mask=live, other=0) ^ SALT_KEY)


@triton.jit
def seed_of(rows, row, req, live):
    """Lineage before the row's position 0."""
    seed = live.to(tl.int64) * 0
    if rows.seeds is not None:
        seed = tl.load(rows.seeds + row, mask=live, other=0)
    elif rows.seed_table is not None:
        seed = tl.load(rows.seed_table + req, mask=live, other=0)
    return seed


@triton.jit
def lineage_row_of(rows, row, req, live):
    """The row of `expected_lineage` that a batch row goes on from."""
    lineage_row = req
    if rows.lineage_rows is not None:
        lineage_row = tl.load(rows.lineage_rows + row, mask=live, other=0)
    return lineage_row


@triton.jit
def column_of(rows, position, row):
    """Columns of `req_to_token` in which positions of a batch row stand."""
    if rows.shift_from is not None:
        shifted = position >= tl.load(rows.shift_from + row)
        position = position + tl.where(shifted, tl.load(rows.column_shift + row), 0)
    return position


@triton.jit
def in_table(table, column, req, mask):
    """What stands in columns of row `req` as int64; -1 beyond the table and outside of
    `mask`."""
    mask = mask & (column >= 0) & (column < table.width)
    at = table.at + req * table.stride + column
    return tl.load(at, mask=mask, other=-1).to(tl.int64)
