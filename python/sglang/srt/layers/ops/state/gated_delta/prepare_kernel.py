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

_BLOCK = tl.constexpr(16)
_CHUNK = tl.constexpr(CHUNK_TOKENS)


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
        keys = load_heads(k, token, key_head, k_stride, is_token, SIZES)
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        strength = tl.load(beta + gate, mask=is_token, other=0.0).to(tl.float32)
        lower = strength[:, None] * gap * products
        tl.store(cell, tl.where(i[:, None] > i[None, :], lower, 0.0))
        queries = load_heads(q, token, key_head, q_stride, is_token, SIZES)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        tl.store(cell + CHUNK * CHUNK, scale * gap * products)
        _invert(matrix, CHUNK)
