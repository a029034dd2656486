"""Triton kernels of the gated delta rule. `chunked.py` has the formulas; trees are in
`tree_kernel.py`.

`prepare_kernel` solves what does not need the state, for all chunks at once;
`scan_kernel` takes the state through the chunks of a row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kv_canary.kernels.triton.state_sums import (
    RowSums,
    compare_sum,
    keep_sum,
    load_sum,
    weigh,
)
from sglang.srt.layers.ops.state.shared.row_count import (
    RowCounts,
    read_count,
    write_count,
)
from sglang.srt.layers.ops.state.shared.rows import find_row, first_place
from sglang.srt.layers.ops.state.shared.tracks import CHUNK as CHUNK_TOKENS
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


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


_BLOCK = tl.constexpr(16)
_CHUNK = tl.constexpr(CHUNK_TOKENS)


@triton.jit
def _normed(x, axis: tl.constexpr, NORMALISE: tl.constexpr):
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
def _is_first(head):
    """Whether this program has the first channels of the first head of its row."""
    return (tl.program_id(0) == 0) & (head == 0)


@triton.jit(do_not_specialize_on_alignment=["folded", "checksums", "marks"])
def decode_kernel(  # noqa: PLR0913 - as `scan_kernel`
    q,
    k,
    v,
    g,
    beta,
    state,
    slots,
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
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    channel = tl.arange(0, SIZES.k_block)
    column = tl.program_id(0) * SIZES.v_tile + tl.arange(0, SIZES.v_tile)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    is_channel, is_column = channel < SIZES.d_k, column < SIZES.d_v
    key = (head // SIZES.group) * SIZES.d_k + channel
    let_next_start(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(slots + row)
    counts = RowCounts(folded, folded_stride, _is_first(head))
    before = read_count(counts, slot, True)
    cell, is_cell = state_cells(state, slot, state_stride, head, channel, column, SIZES)
    number = cell_of(head, SIZES)
    sums = RowSums(checksums, checksums_stride, marks, marks_stride, number)
    due = load_sum(sums, slot, True)
    loaded = tl.load(cell, mask=is_cell, other=0.0)
    keys = tl.load(k + row * k_stride + key, mask=is_channel, other=0.0)
    queries = tl.load(q + row * q_stride + key, mask=is_channel, other=0.0)
    value = v + row * v_stride + head * SIZES.d_v + column
    value = tl.load(value, mask=is_column, other=0.0).to(tl.float32)
    strength = tl.load(beta + row * SIZES.heads + head).to(tl.float32)
    step = tl.load(g + row * SIZES.heads + head)
    # Behind all loads: nothing is loaded across the barriers of a sum.
    weighed = weigh_cells(sums, loaded, channel, column, is_cell, SIZES)
    compare_sum(sums, slot, weighed, due, True)
    keys = _normed(keys.to(tl.float32), 0, SIZES.normalise)
    queries = _normed(queries.to(tl.float32), 0, SIZES.normalise)
    here = loaded.to(tl.float32) * tl.exp(step)
    u = strength * (value - tl.sum(here * keys[:, None], axis=0))
    here += keys[:, None] * u[None, :]
    result = scale * tl.sum(here * queries[:, None], axis=0)
    place = out + (row * SIZES.heads + head) * SIZES.d_v + column
    tl.store(place, result.to(out.dtype.element_ty), mask=is_column)
    stored = here.to(state.dtype.element_ty)
    tl.store(cell, stored, mask=is_cell)
    weighed = weigh_cells(sums, stored, channel, column, is_cell, SIZES)
    keep_sum(sums, slot, weighed, True)
    write_count(counts, slot, before + 1, True)


@triton.jit
def _load_heads(x, token, head, stride, is_token, SIZES: tl.constexpr):
    """Load one key head of a chunk, [tokens, k_block] float32, normalised; zeros
    outside."""
    channel = tl.arange(0, SIZES.k_block)
    place = token.to(tl.int64)[:, None] * stride + head * SIZES.d_k + channel[None, :]
    mask = is_token[:, None] & (channel < SIZES.d_k)[None, :]
    loaded = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    return _normed(loaded, 1, SIZES.normalise)


@triton.jit
def _invert(matrix, CHUNK: tl.constexpr):
    """Replace A, [CHUNK, CHUNK] strictly lower triangular in memory, by the inverse of
    I + A.

    Blocks of 16 on the diagonal by forward substitution, all at once, then pairs of
    blocks. The product of powers of A would need fewer steps, but its terms cancel
    where keys repeat. Blocks change their shape through memory, because a reshape in
    registers spills.
    """
    SIDE: tl.constexpr = _BLOCK
    BLOCKS: tl.constexpr = CHUNK // SIDE
    first = tl.arange(0, BLOCKS)[:, None, None] * SIDE
    row, column = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    diagonal = matrix + (first + row) * CHUNK + first + column
    # Other threads than the writers read the matrix back.
    tl.debug_barrier()
    lower = tl.load(diagonal)
    solved = tl.where(row == column, 1.0, tl.zeros_like(lower))
    for step in range(1, SIDE):
        weights = tl.sum(tl.where(row == step, lower, 0.0), axis=1)
        known = tl.sum(weights[:, :, None] * solved, axis=1)
        solved = tl.where(row == step, solved - known[:, None, :], solved)
    tl.debug_barrier()
    tl.store(diagonal, solved)
    tl.debug_barrier()
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    cell = matrix + i * CHUNK + j
    blocks = tl.load(cell)
    inverse = tl.where(i // SIDE == j // SIDE, blocks, 0.0)
    for level in tl.static_range(6):
        if SIDE * 2**level < CHUNK:
            # Pairs of blocks whose inverses are known, and what lies between them.
            below, left = i // (SIDE * 2**level), j // (SIDE * 2**level)
            is_between = (below // 2 == left // 2) & (below > left)
            between = tl.where(is_between, blocks, 0.0)
            between = tl.dot(inverse, between, input_precision="tf32x3")
            inverse -= tl.dot(between, inverse, input_precision="tf32x3")
    tl.debug_barrier()
    tl.store(cell, inverse)


@triton.jit(do_not_specialize=["rows"])
def prepare_kernel(
    q,
    k,
    g,
    beta,
    qo_indptr,
    matrices,
    decays,
    rows,
    scale,
    q_stride,
    k_stride,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a chunk and head: (I + A)^-1 and the weights of u in the outputs, beside each
    other in `matrices`, and G.
    """
    CHUNK: tl.constexpr = _CHUNK
    place = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = find_row(qo_indptr, rows, place, CHUNK, STEPS)
    done = (place - first_place(qo_indptr, row, CHUNK)) * CHUNK
    begin = tl.load(qo_indptr + row).to(tl.int32) + done
    count = tl.load(qo_indptr + row + 1).to(tl.int32) - begin
    if count > 0:
        is_token = i < count
        token = begin + i
        key_head = head // SIZES.group
        is_upto = i[:, None] >= i[None, :]
        gate = token.to(tl.int64) * SIZES.heads + head
        steps = tl.load(g + gate, mask=is_token, other=0.0)
        decay = tl.sum(tl.where(is_upto, steps[None, :], 0.0), axis=1)
        tl.store(decays + gate, decay, mask=is_token)
        # Masked before exp, which would overflow.
        gap = tl.where(is_upto, decay[:, None] - decay[None, :], float("-inf"))
        gap = tl.exp(gap)
        matrix = place.to(tl.int64) * SIZES.heads + head
        matrix = matrices + matrix * 2 * CHUNK * CHUNK
        cell = matrix + i[:, None] * CHUNK + i[None, :]
        keys = _load_heads(k, token, key_head, k_stride, is_token, SIZES)
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        strength = tl.load(beta + gate, mask=is_token, other=0.0).to(tl.float32)
        lower = strength[:, None] * gap * products
        tl.store(cell, tl.where(i[:, None] > i[None, :], lower, 0.0))
        queries = _load_heads(q, token, key_head, q_stride, is_token, SIZES)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        tl.store(cell + CHUNK * CHUNK, scale * gap * products)
        _invert(matrix, CHUNK)


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
    counts = RowCounts(folded, folded_stride, _is_first(head))
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
        keys = _load_heads(k, token, key_head, k_stride, is_token, SIZES)
        read = tl.dot(keys, here, input_precision=PRECISION)
        rhs = strength[:, None] * (value.to(tl.float32) - faded * read)
        u = tl.dot(tl.load(inverse), rhs, input_precision=PRECISION)
        queries = _load_heads(q, token, key_head, q_stride, is_token, SIZES)
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


@triton.jit(
    do_not_specialize=["nodes"],
    do_not_specialize_on_alignment=["folded", "checksums", "marks"],
)
def commit_kernel(
    node_keys,
    node_u,
    decays,
    state,
    slots,
    path,
    path_lens,
    nodes,
    path_width,
    state_stride,
    folded,
    folded_stride,
    checksums,
    checksums_stride,
    marks,
    marks_stride,
    PATH: tl.constexpr,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """States after the accepted nodes; PATH holds `path_width` of them."""
    channel = tl.arange(0, SIZES.k_block)
    column = tl.program_id(0) * SIZES.v_tile + tl.arange(0, SIZES.v_tile)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    step = tl.arange(0, PATH)
    is_column = column < SIZES.d_v
    let_next_start(PDL)
    wait_for_inputs(PDL)
    length = tl.minimum(tl.load(path_lens + row), path_width)
    if length > 0:
        node = tl.load(path + row * path_width + step, mask=step < length, other=-1)
        is_node = (node >= 0) & (node < nodes)
        gate = node * SIZES.heads + head
        decay = tl.load(decays + gate, mask=is_node, other=0.0)
        last = tl.sum(tl.where(step == length - 1, decay, 0.0), axis=0)
        fading = tl.where(is_node, tl.exp(last - decay), 0.0)
        key = node * (SIZES.heads // SIZES.group) + head // SIZES.group
        key = key[:, None] * SIZES.d_k + channel[None, :]
        is_key = is_node[:, None] & (channel < SIZES.d_k)[None, :]
        keys = tl.load(node_keys + key, mask=is_key, other=0.0).to(tl.float32)
        u = node_u + gate[:, None] * SIZES.d_v + column[None, :]
        is_u = is_node[:, None] & is_column[None, :]
        u = tl.load(u, mask=is_u, other=0.0).to(tl.float32)
        slot = tl.load(slots + row)
        counts = RowCounts(folded, folded_stride, _is_first(head))
        before = read_count(counts, slot, True)
        cell, is_cell = state_cells(
            state, slot, state_stride, head, channel, column, SIZES
        )
        number = cell_of(head, SIZES)
        sums = RowSums(checksums, checksums_stride, marks, marks_stride, number)
        due = load_sum(sums, slot, True)
        loaded = tl.load(cell, mask=is_cell, other=0.0)
        weighed = weigh_cells(sums, loaded, channel, column, is_cell, SIZES)
        compare_sum(sums, slot, weighed, due, True)
        here = loaded.to(tl.float32)
        added = tl.trans(keys * fading[:, None])
        here = tl.exp(last) * here + tl.dot(added, u, input_precision="tf32x3")
        stored = here.to(state.dtype.element_ty)
        tl.store(cell, stored, mask=is_cell)
        weighed = weigh_cells(sums, stored, channel, column, is_cell, SIZES)
        keep_sum(sums, slot, weighed, True)
        write_count(counts, slot, before + length, True)
