"""Triton kernels of the short convolution.

`conv_kernel` reads states and writes outputs, for prefills and trees; `fold_kernel`
moves inputs into states, for prefills and commits; `decode_kernel` does both for one
token.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kv_canary.kernels.triton.state_sums import (
    RowSums,
    compare_rows,
    compare_sum,
    keep_sum,
    load_sum,
    weigh_tap,
)
from sglang.srt.layers.ops.state.shared.row_count import (
    RowCounts,
    read_count,
    write_count,
)
from sglang.srt.layers.ops.state.shared.rows import find_row
from sglang.srt.layers.ops.state.shared.tracks import CHUNK
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


class ConvSizes(NamedTuple):
    """Constants that the kernels are compiled for; their argument SIZES.

    Fields:
        channels, width, silu: of the filter.
        channel_block: channels of a program.
    """

    channels: int
    channel_block: int
    width: int
    silu: bool


_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _activate(sums, bias, channel, is_channel, SILU: tl.constexpr):
    """Add the bias to float32 sums [.., channels], and apply SiLU if asked to."""
    if bias is not None:
        added = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
        sums += added
    if SILU:
        sums = sums / (1.0 + tl.exp(-sums))
    return sums


@triton.jit(do_not_specialize_on_alignment=["folded", "checksums", "marks"])
def decode_kernel(
    x,
    weight,
    bias,
    state,
    slots,
    out,
    x_stride,
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
    WIDTH: tl.constexpr = SIZES.width
    BLOCK: tl.constexpr = SIZES.channel_block
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    is_channel = channel < SIZES.channels
    let_next_start(PDL)
    wait_for_inputs(PDL)
    newest = tl.load(x + row * x_stride + channel, mask=is_channel, other=0.0)
    slot = tl.load(slots + row)
    counts = RowCounts(folded, folded_stride, tl.program_id(0) == 0)
    before = read_count(counts, slot, True)
    kept = state + slot * state_stride + channel * (WIDTH - 1)
    taps = weight + channel * WIDTH
    last = tl.load(taps + WIDTH - 1, mask=is_channel, other=0.0).to(tl.float32)
    sums = last * newest.to(tl.float32)
    number = tl.program_id(0)
    cells = RowSums(checksums, checksums_stride, marks, marks_stride, number)
    due = load_sum(cells, slot, True)
    loaded = tl.zeros([BLOCK], dtype=tl.int64)
    stored = loaded
    for column in tl.static_range(WIDTH - 1):
        old = tl.load(kept + column, mask=is_channel, other=0.0)
        loaded += weigh_tap(cells, old, column, channel, is_channel)
        # A thread owns whole channels, and has read every column that it overwrites.
        if column > 0:
            tl.store(kept + column - 1, old, mask=is_channel)
            stored += weigh_tap(cells, old, column - 1, channel, is_channel)
        tap = tl.load(taps + column, mask=is_channel, other=0.0).to(tl.float32)
        sums += tap * old.to(tl.float32)
    tl.store(kept + WIDTH - 2, newest, mask=is_channel)
    stored += weigh_tap(cells, newest, WIDTH - 2, channel, is_channel)
    compare_sum(cells, slot, loaded, due, True)
    keep_sum(cells, slot, stored, True)
    write_count(counts, slot, before + 1, True)
    result = _activate(sums, bias, channel, is_channel, SIZES.silu)
    place = out + row * SIZES.channels + channel
    tl.store(place, result.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(
    do_not_specialize=["tokens", "rows"],
    do_not_specialize_on_alignment=["checksums", "marks"],
)
def conv_kernel(  # noqa: PLR0913 - a tuple's pointers would be specialized on
    x,
    weight,
    bias,
    state,
    slots,
    qo_indptr,
    has_state,
    parent_index,
    out,
    tokens,
    rows,
    x_stride,
    state_stride,
    checksums,
    checksums_stride,
    marks,
    marks_stride,
    NODES: tl.constexpr,
    TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs of trees of NODES nodes, or of ragged rows if there is no
    `parent_index`.
    """
    WIDTH: tl.constexpr = SIZES.width
    BLOCK: tl.constexpr = SIZES.channel_block
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_channel = channel < SIZES.channels
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if parent_index is not None:
        row = token // NODES
        first = row * NODES
        is_token = token < tokens
        is_known = is_token
    else:
        row = find_row(qo_indptr, rows, token, 0, STEPS).to(tl.int32)
        first = tl.load(qo_indptr + row).to(tl.int32)
        is_token = (token >= first) & (token < tl.load(qo_indptr + row + 1))
        is_known = is_token & (tl.load(has_state + row) != 0)
    slot = tl.load(slots + row, mask=is_token, other=0)
    kept = state + slot[:, None] * state_stride + channel[None, :] * (WIDTH - 1)
    sums = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    number = tl.program_id(0)
    cells = RowSums(checksums, checksums_stride, marks, marks_stride, number)
    # The root of a tree reads the whole state.
    loaded = tl.zeros([TOKENS, BLOCK], dtype=tl.int64)
    is_root = is_token & (token == first)
    # A token, or -m for the m-th newest input of the prefix.
    source = token
    for distance in tl.static_range(WIDTH):
        is_new = is_token & (source >= 0)
        new = x + source.to(tl.int64)[:, None] * x_stride + channel[None, :]
        value = tl.load(new, mask=is_new[:, None] & is_channel[None, :], other=0.0)
        if distance > 0:
            is_old = is_known & (source < 0)
            old = tl.load(
                kept + (WIDTH - 1 + source)[:, None],
                mask=is_old[:, None] & is_channel[None, :],
                other=0.0,
            )
            value = tl.where(is_old[:, None], old, value)
            is_whole = is_root[:, None] & is_channel[None, :]
            loaded += weigh_tap(cells, old, WIDTH - 1 - distance, channel, is_whole)
        tap = tl.load(
            weight + channel * WIDTH + WIDTH - 1 - distance, mask=is_channel, other=0.0
        )
        sums += value.to(tl.float32) * tap.to(tl.float32)[None, :]
        if parent_index is not None:
            before = tl.load(parent_index + source, mask=is_new, other=-1)
            is_node = (before >= first) & (before < source)
            before = tl.where(is_node, before, -1).to(tl.int32)
        else:
            before = tl.where(source > first, source - 1, -1)
        source = tl.where(source >= 0, before, source - 1)
    compare_rows(cells, slot, loaded, is_root)
    result = _activate(sums, bias, channel, is_channel, SIZES.silu)
    result = tl.where(is_token[:, None], result, 0.0)
    tl.store(
        out + token.to(tl.int64)[:, None] * SIZES.channels + channel[None, :],
        result.to(out.dtype.element_ty),
        mask=(token < tokens)[:, None] & is_channel[None, :],
    )


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=[
        "folded",
        "checksums",
        "marks",
        "track_lens",
        "track_slots",
    ],
)
def fold_kernel(  # noqa: PLR0913 - as `conv_kernel`
    x,
    state,
    slots,
    qo_indptr,
    has_state,
    path,
    path_lens,
    tokens,
    path_width,
    x_stride,
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
    CHANNELS: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """States after the tokens of a path, or of ragged rows if there is no `path`."""
    channel = tl.program_id(0) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    row = tl.program_id(1).to(tl.int64)
    is_channel = channel < CHANNELS
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if path is not None:
        begin = row * path_width
        length = tl.minimum(tl.maximum(tl.load(path_lens + row), 0), path_width)
        is_known = True
    else:
        begin = tl.load(qo_indptr + row)
        length = tl.load(qo_indptr + row + 1) - begin
        is_known = tl.load(has_state + row) != 0
    own = tl.load(slots + row)
    counts = RowCounts(folded, folded_stride, tl.program_id(0) == 0)
    before = read_count(counts, own, is_known)
    kept = state + own * state_stride + channel * (WIDTH - 1)
    number = tl.program_id(0)
    cells = RowSums(checksums, checksums_stride, marks, marks_stride, number)
    nothing = tl.zeros([CHANNEL_BLOCK], dtype=tl.int64)
    if checksums is not None:
        due = load_sum(cells, own, is_known)
        loaded = nothing
        for column in tl.static_range(WIDTH - 1):
            old = tl.load(kept + column, mask=is_channel & is_known, other=0.0)
            loaded += weigh_tap(cells, old, column, channel, is_channel)
        compare_sum(cells, own, loaded, due, is_known)
    # Tracks come first, because they may need what the row's own state overwrites.
    for track in tl.static_range(TRACKS + 1):
        slot, after, is_due = own, length, True
        if track < TRACKS:
            place = row * TRACKS + track
            after = tl.load(track_lens + place)
            is_reached = (after % _CHUNK == 0) | (after == length)
            is_due = is_reached & (after > 0) & (after <= length)
            slot = tl.load(track_slots + place)
        write_count(counts, slot, before + after, is_due)
        is_stored = is_channel & is_due
        target = state + slot * state_stride + channel * (WIDTH - 1)
        stored = nothing
        # Column i becomes input i + after of old columns and new inputs. Ascending, no
        # column is written before a thread, which owns whole channels, has read it.
        for column in tl.static_range(WIDTH - 1):
            place = column + after
            is_old = place < WIDTH - 1
            old = tl.load(kept + place, mask=is_stored & is_old & is_known, other=0.0)
            step = place - (WIDTH - 1)
            token = begin + step
            if path is not None:
                token = tl.load(path + token, mask=step >= 0, other=0)
            is_new = (step >= 0) & (token >= 0) & (token < tokens)
            new = tl.load(
                x + token * x_stride + channel, mask=is_stored & is_new, other=0.0
            )
            value = tl.where(is_old, old, new)
            tl.store(target + column, value, mask=is_stored)
            stored += weigh_tap(cells, value, column, channel, is_stored)
        keep_sum(cells, slot, stored, is_due)
