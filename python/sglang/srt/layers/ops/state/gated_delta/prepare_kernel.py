"""What a prefill of the gated delta rule solves without the state, for all chunks at
once, in Triton. `chunked.py` has the formulas."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.ops.state.gated_delta.cells import (
    load_heads,
)
from sglang.srt.layers.ops.state.shared.rows import find_row, first_place
from sglang.srt.layers.ops.state.shared.tracks import CHUNK as CHUNK_TOKENS
from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs

# Side of the blocks that are inverted row by row.
_SIDE = tl.constexpr(16)
# Of the products that join them.
_PRECISION = tl.constexpr("tf32x3")
_CHUNK = tl.constexpr(CHUNK_TOKENS)


@triton.jit
def _invert(matrix, CHUNK: tl.constexpr):
    """Replace A, [CHUNK, CHUNK] strictly lower triangular in memory, by the inverse of
    I + A: blocks on the diagonal, then pairs of blocks.

    The product of powers of A would need fewer steps, but its terms cancel where keys
    repeat.
    """
    # Other threads than the writers read the matrix back, here and below.
    tl.debug_barrier()
    _invert_diagonal(matrix, CHUNK)
    for level in tl.static_range(6):
        if _SIDE * 2**level < CHUNK:
            tl.debug_barrier()
            _join_pairs(matrix, _SIDE * 2**level, CHUNK)


@triton.jit
def _invert_diagonal(matrix, CHUNK: tl.constexpr):
    """Invert the blocks on the diagonal by forward substitution. A thread has a column
    of an inverse in registers and reads the block's rows, so that none waits for
    another."""
    lane = tl.arange(0, CHUNK)
    column = lane % _SIDE
    block = matrix + (lane - column) * (CHUNK + 1)
    solved = ()
    for row in tl.static_range(_SIDE):
        cell = tl.where(column == row, 1.0, 0.0)
        for known in tl.static_range(row):
            cell -= tl.load(block + row * CHUNK + known) * solved[known]
        solved = solved + (cell,)  # type: ignore[assignment]
    tl.debug_barrier()
    for row in tl.static_range(_SIDE):
        tl.store(block + row * CHUNK + column, solved[row])


@triton.jit
def _join_pairs(matrix, SIDE: tl.constexpr, CHUNK: tl.constexpr):
    """Complete inverses of blocks of 2 * SIDE: with the inverses L and R of their
    halves on the diagonal, and B below L, there comes -R B L."""
    pair = tl.arange(0, CHUNK // (2 * SIDE))[:, None, None] * (2 * SIDE * (CHUNK + 1))
    i, j = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    left = matrix + pair + i * CHUNK + j
    below = left + SIDE * CHUNK
    product = tl.dot(tl.load(below + SIDE), tl.load(below), input_precision=_PRECISION)
    product = tl.dot(product, tl.load(left), input_precision=_PRECISION)
    tl.debug_barrier()
    tl.store(below, -product)


@triton.jit
def _raw_heads(x, token, head, stride, is_token, SIZES: tl.constexpr):
    """Load one key head of a chunk, [tokens, k_block], and the factors that normalise
    it, [tokens] float32. Products of what is loaded are exact in float32 if it has 16
    bits, and take half the memory."""
    loaded = load_heads(x, token, head, stride, is_token, SIZES)
    if SIZES.normalise:
        wide = loaded.to(tl.float32)
        return loaded, tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)
    else:
        return loaded, tl.where(is_token, 1.0, 0.0)


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
        decay = tl.cumsum(steps, 0)
        tl.store(decays + gate, decay, mask=is_token)
        # Masked before exp, which would overflow.
        gap = tl.where(is_upto, decay[:, None] - decay[None, :], float("-inf"))
        gap = tl.exp(gap)
        matrix = place.to(tl.int64) * SIZES.heads + head
        matrix = matrices + matrix * 2 * CHUNK * CHUNK
        cell = matrix + i[:, None] * CHUNK + i[None, :]
        keys, key_norm = _raw_heads(k, token, key_head, k_stride, is_token, SIZES)
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        products *= key_norm[:, None] * key_norm[None, :]
        strength = tl.load(beta + gate, mask=is_token, other=0.0).to(tl.float32)
        lower = strength[:, None] * gap * products
        tl.store(cell, tl.where(i[:, None] > i[None, :], lower, 0.0))
        queries, norm = _raw_heads(q, token, key_head, q_stride, is_token, SIZES)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        products *= norm[:, None] * key_norm[None, :]
        tl.store(cell + CHUNK * CHUNK, scale * gap * products)
        _invert(matrix, CHUNK)
