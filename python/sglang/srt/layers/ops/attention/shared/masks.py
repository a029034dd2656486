"""Device functions of the extend kernels: which elements a tile of queries attends.

The causal rule, a sliding window or a tree mask; Triton inlines these functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from sglang.srt.layers.ops.attention.shared.elements import page_at, page_to_slots


class ScoreMask(NamedTuple):
    """Which elements of a row the queries of a tile attend.

    A kernel builds it itself, because no device function may return a tuple that
    contains None (Triton 3.6 fails to compile one).

    Fields:
        row, q_begin: the row, and the number of its first new token in the batch.
        own: [queries], the element of each query's own token.
        position: [queries], the position of each query's own token.
        lo, end: elements that some query may attend; others are not read.
        prefix, new_tokens: number of elements before the new tokens, and of new tokens.
        window: positions up to its own that a query attends, or None for all.
        tree: [rows, new_tokens, new_tokens] bytes, which new tokens attend which, or
            None for the causal rule.
        positions: positions of the new tokens of all rows if there are a tree and a
            window, else None: the position is the element.
    """

    row: tl.tensor
    q_begin: tl.tensor

    own: tl.tensor
    position: tl.tensor
    lo: tl.tensor
    end: tl.tensor
    prefix: tl.tensor
    new_tokens: tl.tensor
    window: tl.tensor
    tree: tl.tensor
    positions: tl.tensor


@triton.jit
def attended_bounds(
    prefix,
    first_token,
    last_token,
    new_tokens,
    window,
    HAS_TREE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return (lo, left, right, end). Some query of the tile attends lo .. end, and
    every query attends the whole tiles left .. right, which may be empty."""
    lo = prefix * 0
    left = prefix * 0
    if HAS_TREE:
        end = prefix + new_tokens
        right = prefix // BLOCK_N * BLOCK_N
    else:
        end = prefix + last_token + 1
        right = (prefix + first_token + 1) // BLOCK_N * BLOCK_N
    if window is not None:
        if HAS_TREE:
            # A node's depth is anything from the root's to the end of a chain.
            first_token = 0
            last_token = new_tokens - 1
        lo = tl.maximum(prefix + first_token - window + 1, 0)
        left = tl.maximum(prefix + last_token - window + 1, 0)
        left = tl.minimum(tl.cdiv(left, BLOCK_N), tl.cdiv(end, BLOCK_N)) * BLOCK_N
        right = tl.maximum(left, right)
    return lo, left, right, end


@triton.jit
def load_row_lens(lens, row):
    """Return (number of a row's first new token in the batch, new tokens, elements
    before them)."""
    q_begin = tl.load(lens.qo_indptr + row)
    new_tokens = (tl.load(lens.qo_indptr + row + 1) - q_begin).to(tl.int32)
    return q_begin, new_tokens, tl.load(lens.prefix_lens + row).to(tl.int32)


@triton.jit
def query_positions(positions, q_begin, own, prefix, is_token):
    """Return positions of a tile's queries: [queries]; see `ScoreMask`."""
    position = own
    if positions is not None:
        at = positions + q_begin + (own - prefix)
        position = tl.load(at, mask=is_token, other=0).to(tl.int32)
    return position


@triton.jit
def masked_at(kv, new, mask, element, PAGE_SIZE: tl.constexpr):
    """Return pointers to K and V of elements and which of them may be read, each
    [elements, channels]. With `new`, new tokens come from there, else from the pool."""
    is_read = (element >= mask.lo) & (element < mask.end)
    page = tl.load(
        page_at(kv, element, PAGE_SIZE),
        mask=is_read if new is None else is_read & (element < mask.prefix),
        other=0,
    )
    slot = page_to_slots(page, element, PAGE_SIZE)
    k_at = kv.k + slot * kv.k_stride
    v_at = kv.v + slot * kv.v_stride
    if new is not None:
        is_old = (element < mask.prefix)[:, None]
        number = (element - mask.prefix).to(tl.int64)[:, None]
        k_at = tl.where(is_old, k_at, new.k + number * new.k_stride)
        v_at = tl.where(is_old, v_at, new.v + number * new.v_stride)
    return k_at, v_at, is_read[:, None] & kv.is_channel[None, :]


@triton.jit
def is_attended(mask, element):
    """Return whether a query attends an element: [queries, elements]."""
    if mask.tree is not None:
        branch = element - mask.prefix
        tree = mask.tree + mask.row.to(tl.int64) * mask.new_tokens * mask.new_tokens
        tree_row = ((mask.own - mask.prefix) * mask.new_tokens)[:, None]
        in_tree = tl.load(
            tree + tree_row + branch[None, :],
            mask=((branch >= 0) & (element < mask.end))[None, :]
            & (mask.own < mask.end)[:, None],
            other=0,
        )
        attends = (in_tree != 0) | (branch < 0)[None, :]
        if mask.window is not None:
            is_new = (branch >= 0) & (element < mask.end)
            at = mask.positions + mask.q_begin + branch
            at = tl.load(at, mask=is_new, other=0).to(tl.int32)
            at = tl.where(is_new, at, element)
            attends &= at[None, :] > mask.position[:, None] - mask.window
    else:
        attends = element[None, :] <= mask.own[:, None]
        if mask.window is not None:
            attends &= element[None, :] > mask.own[:, None] - mask.window
    return attends & ((element >= mask.lo) & (element < mask.end))[None, :]
