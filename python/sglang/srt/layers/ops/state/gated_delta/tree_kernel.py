"""Triton kernel of the gated delta rule over trees. `chunked.py` has the formulas.

The corrections u of a tree solve u = r - A u, where A weighs a node's ancestors alone.
A node is right once its ancestors are, so as many rounds as the longest path has steps
give every u, each by the same products as a substitution in order: nothing is inverted.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kv_canary.kernels.triton.state_sums import RowSums, compare_sum, load_sum
from sglang.srt.layers.ops.state.gated_delta.cells import (
    cell_of,
    state_cells,
    weigh_cells,
)
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs

PARTS = "bfloat16 parts"
_PARTS = tl.constexpr(PARTS)


class TreeForm(NamedTuple):
    """What the kernel is compiled for; its argument FORM.

    Fields:
        nodes: nodes of a tree. block: power of two that holds them, at least 16.
        precision: PARTS if q and k are bfloat16, so that their products are exact, and
            float32 operands are multiplied as two bfloat16 parts; or that of products
            of float32.
        channels: of d_k, taken at a time. More need more registers.
    """

    nodes: int
    block: int
    precision: str
    channels: int


@triton.jit
def _parts(x):
    """Split float32 into two bfloat16 parts, which keep 16 bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(a, b, FORM: tl.constexpr):
    """Multiply float32 matrices; as parts, without the product of the low ones."""
    if FORM.precision == _PARTS:
        a_high, a_low = _parts(a)
        b_high, b_low = _parts(b)
        small = tl.dot(a_high, b_low, acc=tl.dot(a_low, b_high))
        return tl.dot(a_high, b_high, acc=small)
    else:
        return tl.dot(a, b, input_precision=FORM.precision)


@triton.jit
def _add_product(total, heads, other, FORM: tl.constexpr):
    """Add the product of raw heads with raw heads or with float32."""
    if FORM.precision != _PARTS:
        a, b = heads.to(tl.float32), other.to(tl.float32)
        total = tl.dot(a, b, acc=total, input_precision=FORM.precision)
    elif other.dtype == tl.float32:
        high, low = _parts(other)
        total = tl.dot(heads, high, acc=tl.dot(heads, low, acc=total))
    else:
        total = tl.dot(heads, other, acc=total)
    return total


@triton.jit
def _load_raw(x, token, head, channel, stride, is_node, SIZES: tl.constexpr):
    """Load channels of one key head of all nodes, [block, channels]."""
    place = token[:, None] * stride + head * SIZES.d_k + channel[None, :]
    mask = is_node[:, None] & (channel < SIZES.d_k)[None, :]
    return tl.load(x + place, mask=mask, other=0.0)


@triton.jit
def _squares(raw, NORMALISE: tl.constexpr):
    """Return what channels add to the squared norm of each node."""
    wide = raw.to(tl.float32)
    return tl.sum(wide * wide, axis=1) if NORMALISE else 0.0


@triton.jit
def _keep_keys(
    node_keys,
    k,
    norm,
    token,
    head,
    stride,
    is_node,
    FORM: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Store the keys as they are used."""
    node = token * (SIZES.heads // SIZES.group) + head
    for begin in range(0, SIZES.k_block, FORM.channels):
        channel = begin + tl.arange(0, FORM.channels)
        raw = _load_raw(k, token, head, channel, stride, is_node, SIZES)
        used = raw.to(tl.float32) * norm[:, None]
        place = node[:, None] * SIZES.d_k + channel[None, :]
        mask = is_node[:, None] & (channel < SIZES.d_k)[None, :]
        tl.store(node_keys + place, used.to(node_keys.dtype.element_ty), mask=mask)


@triton.jit
def _load_mask(mask, row, i, FORM: tl.constexpr):
    """Load a tree's mask below the diagonal, [block, block]."""
    NODES: tl.constexpr = FORM.nodes
    seen = mask + row.to(tl.int64) * NODES * NODES + i[:, None] * NODES + i[None, :]
    is_before = (i[:, None] > i[None, :]) & (i < NODES)[:, None]
    return tl.load(seen, mask=is_before, other=0)


@triton.jit(do_not_specialize_on_alignment=["checksums", "marks"])
def tree_kernel(  # noqa: PLR0913, PLR0915 - as `scan_kernel`
    q,
    k,
    v,
    g,
    beta,
    mask,
    state,
    slots,
    out,
    node_keys,
    node_u,
    decays,
    scale,
    q_stride,
    k_stride,
    v_stride,
    state_stride,
    checksums,
    checksums_stride,
    marks,
    marks_stride,
    FORM: tl.constexpr,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs of a tree, and what a commit needs of its nodes."""
    BLOCK: tl.constexpr = FORM.block
    COLUMNS: tl.constexpr = SIZES.v_tile
    CHANNELS: tl.constexpr = FORM.channels
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    row = tl.program_id(2)
    key_head = head // SIZES.group
    i = tl.arange(0, BLOCK)
    is_node = i < FORM.nodes
    token = row.to(tl.int64) * FORM.nodes + i
    gate = token * SIZES.heads + head
    let_next_start(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(slots + row)
    number = cell_of(head, SIZES)
    sums = RowSums(checksums, checksums_stride, marks, marks_stride, number)
    due = load_sum(sums, slot, True)
    weighed = tl.zeros([CHANNELS, COLUMNS], dtype=tl.int64)
    is_value = is_node[:, None] & (column < SIZES.d_v)[None, :]
    value = token[:, None] * v_stride + head * SIZES.d_v + column[None, :]
    value = tl.load(v + value, mask=is_value, other=0.0)
    steps = tl.load(g + gate, mask=is_node, other=0.0)
    strength = tl.load(beta + gate, mask=is_node, other=0.0).to(tl.float32)
    seen = _load_mask(mask, row, i, FORM)
    of_keys = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    of_queries = of_keys
    read = tl.zeros([BLOCK, COLUMNS], dtype=tl.float32)
    result = read
    key_norm = tl.zeros([BLOCK], dtype=tl.float32)
    query_norm = key_norm
    for begin in range(0, SIZES.k_block, FORM.channels):
        channel = begin + tl.arange(0, FORM.channels)
        cell, is_cell = state_cells(
            state, slot, state_stride, head, channel, column, SIZES
        )
        loaded = tl.load(cell, mask=is_cell, other=0.0)
        weighed += weigh_cells(sums, loaded, channel, column, is_cell, SIZES)
        here = loaded.to(tl.float32)
        keys = _load_raw(k, token, key_head, channel, k_stride, is_node, SIZES)
        queries = _load_raw(q, token, key_head, channel, q_stride, is_node, SIZES)
        key_norm += _squares(keys, SIZES.normalise)
        query_norm += _squares(queries, SIZES.normalise)
        of_keys = _add_product(of_keys, keys, tl.trans(keys), FORM)
        of_queries = _add_product(of_queries, queries, tl.trans(keys), FORM)
        read = _add_product(read, keys, here, FORM)
        result = _add_product(result, queries, here, FORM)
    compare_sum(sums, slot, weighed, due, True)
    if SIZES.normalise:
        key_norm = tl.rsqrt(key_norm + 1e-6)
        query_norm = tl.rsqrt(query_norm + 1e-6)
    else:
        key_norm += 1.0
        query_norm += 1.0
    is_upto = (seen != 0) | (i[:, None] == i[None, :])
    longest = tl.max(tl.sum(is_upto.to(tl.int32), axis=1), axis=0)
    decay = tl.sum(tl.where(is_upto, steps[None, :], 0.0), axis=1)
    # Masked before exp, which would overflow.
    gap = tl.where(is_upto, decay[:, None] - decay[None, :], float("-inf"))
    gap = tl.exp(gap) * key_norm[None, :]
    weights = query_norm[:, None] * gap * of_queries
    gap = tl.where(i[:, None] > i[None, :], gap, 0.0)
    lower = (strength * key_norm)[:, None] * gap * of_keys
    faded = tl.exp(decay)[:, None]
    first = strength[:, None] * (
        value.to(tl.float32) - faded * key_norm[:, None] * read
    )
    u = first
    for _ in range(1, longest):
        u = first - _product(lower, u, FORM)
    result = faded * query_norm[:, None] * result + _product(weights, u, FORM)
    target = gate[:, None] * SIZES.d_v + column[None, :]
    tl.store(out + target, (scale * result).to(out.dtype.element_ty), mask=is_value)
    tl.store(node_u + target, u.to(node_u.dtype.element_ty), mask=is_value)
    if tl.program_id(0) == 0:
        tl.store(decays + gate, decay, mask=is_node)
        if head % SIZES.group == 0:
            _keep_keys(
                node_keys,
                k,
                key_norm,
                token,
                key_head,
                k_stride,
                is_node,
                FORM,
                SIZES,
            )
