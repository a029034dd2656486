"""Triton kernels of the gated delta rule that read and write a state once: a decode
step, and the commit of an accepted path. `reference.py` has the formulas."""

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
    normed,
    state_cells,
    weigh_cells,
)
from sglang.srt.layers.ops.state.shared.row_count import (
    RowCounts,
    read_count,
    write_count,
)
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


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
    counts = RowCounts(folded, folded_stride, is_first(head))
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
    keys = normed(keys.to(tl.float32), 0, SIZES.normalise)
    queries = normed(queries.to(tl.float32), 0, SIZES.normalise)
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
        counts = RowCounts(folded, folded_stride, is_first(head))
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
