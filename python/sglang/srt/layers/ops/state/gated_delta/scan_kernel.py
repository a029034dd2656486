"""The kernel that takes states through the chunks of a prefill, in Triton, after
`prepare_kernel.py`. `chunked.py` has the formulas."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.kernels.triton.state_sums import (
    RowSums,
    compare_sum,
    keep_sum,
    load_sum,
)
from sglang.srt.layers.ops.state.gated_delta.cells import (
    cell_of,
    is_first,
    load_heads,
    normed,
    state_cells,
    weigh_cells,
)
from sglang.srt.layers.ops.state.shared.row_count import (
    RowCounts,
    read_count,
    write_count,
)
from sglang.srt.layers.ops.state.shared.rows import first_place
from sglang.srt.layers.ops.state.shared.tracks import CHUNK as CHUNK_TOKENS
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs

_CHUNK = tl.constexpr(CHUNK_TOKENS)


@triton.jit
def _store_tracks(
    after,
    done,
    cell,
    is_cell,
    slot,
    state_stride,
    counts,
    before,
    sums,
    weighed,
    row,
    track_lens,
    track_slots,
    TRACKS: tl.constexpr,
):
    """Store a row's state after `done` tokens in the slots that want it. cell: those of
    the row's own slot, whose addresses are already in registers.
    """
    for track in tl.static_range(TRACKS):
        place = row * TRACKS + track
        if tl.load(track_lens + place) == done:
            target = tl.load(track_slots + place)
            tl.store(cell + (target - slot) * state_stride, after, mask=is_cell)
            keep_sum(sums, target, weighed, True)
            write_count(counts, target, before + done, True)


@triton.jit(
    do_not_specialize_on_alignment=[
        "folded",
        "checksums",
        "marks",
        "track_lens",
        "track_slots",
    ]
)
def scan_kernel(  # noqa: PLR0913, PLR0915 - a tuple's pointers would be specialized on
    q,
    k,
    v,
    beta,
    matrices,
    decays,
    state,
    slots,
    has_state,
    qo_indptr,
    out,
    scale,
    q_stride,
    k_stride,
    v_stride,
    state_stride,
    folded,
    folded_stride,
    checksums,
    checksums_stride,
    marks,
    marks_stride,
    track_lens,
    track_slots,
    TRACKS: tl.constexpr,
    PRECISION: tl.constexpr,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs of a row, and the state after it."""
    CHUNK: tl.constexpr = _CHUNK
    channel = tl.arange(0, SIZES.k_block)
    column = tl.program_id(0) * SIZES.v_tile + tl.arange(0, SIZES.v_tile)
    head = tl.program_id(1)
    row = tl.program_id(2)
    i = tl.arange(0, CHUNK)
    is_column = column < SIZES.d_v
    key_head = head // SIZES.group
    let_next_start(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(slots + row)
    cell, is_cell = state_cells(state, slot, state_stride, head, channel, column, SIZES)
    begin = tl.load(qo_indptr + row).to(tl.int32)
    length = tl.load(qo_indptr + row + 1).to(tl.int32) - begin
    place = first_place(qo_indptr, row, CHUNK)
    is_known = tl.load(has_state + row) != 0
    number = cell_of(head, SIZES)
    sums = RowSums(checksums, checksums_stride, marks, marks_stride, number)
    due = load_sum(sums, slot, is_known)
    loaded = tl.load(cell, mask=is_cell & is_known, other=0.0)
    weighed = weigh_cells(sums, loaded, channel, column, is_cell, SIZES)
    compare_sum(sums, slot, weighed, due, is_known)
    here = loaded.to(tl.float32)
    counts = RowCounts(folded, folded_stride, is_first(head))
    before = read_count(counts, slot, is_known)
    for done in range(0, length, CHUNK):
        is_token = i < length - done
        token = begin + done + i
        gate = token.to(tl.int64) * SIZES.heads + head
        decay = tl.load(decays + gate, mask=is_token, other=0.0)
        strength = tl.load(beta + gate, mask=is_token, other=0.0).to(tl.float32)
        value = token.to(tl.int64)[:, None] * v_stride + head * SIZES.d_v
        is_value = is_token[:, None] & is_column[None, :]
        value = tl.load(v + value + column[None, :], mask=is_value, other=0.0)
        matrix = (place + done // CHUNK).to(tl.int64) * SIZES.heads + head
        matrix = matrices + matrix * 2 * CHUNK * CHUNK
        inverse = matrix + i[:, None] * CHUNK + i[None, :]
        faded = tl.exp(decay)[:, None]
        keys = load_heads(k, token, key_head, k_stride, is_token, SIZES)
        keys = normed(keys.to(tl.float32), 1, SIZES.normalise)
        read = tl.dot(keys, here, input_precision=PRECISION)
        rhs = strength[:, None] * (value.to(tl.float32) - faded * read)
        u = tl.dot(tl.load(inverse), rhs, input_precision=PRECISION)
        queries = load_heads(q, token, key_head, q_stride, is_token, SIZES)
        queries = normed(queries.to(tl.float32), 1, SIZES.normalise)
        result = scale * faded * tl.dot(queries, here, input_precision=PRECISION)
        weights = tl.load(inverse + CHUNK * CHUNK)
        result += tl.dot(weights, u, input_precision=PRECISION)
        target = gate[:, None] * SIZES.d_v + column[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=is_value)
        count = tl.minimum(length - done, CHUNK)
        last = (begin + done + count - 1).to(tl.int64) * SIZES.heads + head
        last = tl.load(decays + last)
        fading = tl.where(is_token, tl.exp(last - decay), 0.0)
        added = tl.trans(keys * fading[:, None])
        here = tl.exp(last) * here + tl.dot(added, u, input_precision=PRECISION)
        after = here.to(state.dtype.element_ty)
        _store_tracks(
            after,
            done + count,
            cell,
            is_cell,
            slot,
            state_stride,
            counts,
            before,
            sums,
            weigh_cells(sums, after, channel, column, is_cell, SIZES),
            row,
            track_lens,
            track_slots,
            TRACKS,
        )
    stored = here.to(state.dtype.element_ty)
    tl.store(cell, stored, mask=is_cell)
    weighed = weigh_cells(sums, stored, channel, column, is_cell, SIZES)
    keep_sum(sums, slot, weighed, True)
    write_count(counts, slot, before + length, True)
