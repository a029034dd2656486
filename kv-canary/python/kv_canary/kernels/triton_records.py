"""Triton kernels that change records apart from a forward: poison and moves."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.kernels.triton_hash import POISON, pack_word3
from kv_canary.records import WriterKind

POISON_KIND = tl.constexpr(int(WriterKind.POISON))


@triton.jit(do_not_specialize=["num_slots", "count"])
def poison_kernel(
    head,
    tail,
    clock,
    slots,
    n_live,
    num_slots,
    count,
    HAS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    if HAS_LIVE:
        inside = inside & (lane < tl.load(n_live))
    slot = tl.load(slots + lane, mask=inside, other=-1)
    inside = inside & (slot >= 0) & (slot < num_slots)
    records = head
    if tl.program_id(1) == 1:
        records = tail
    record = records + slot * 4
    fresh = inside & (tl.load(record, mask=inside, other=POISON) != POISON)
    word3 = tl.load(record + 3, mask=fresh, other=0)
    word3 = pack_word3(tl.load(clock), POISON_KIND, word3)
    tl.store(record, tl.zeros_like(slot) + POISON, mask=fresh)
    tl.store(record + 3, word3, mask=fresh)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["dst", "src"])
def move_kernel(head, tail, dst, src, count, MOVES: tl.constexpr):
    move = tl.arange(0, MOVES)
    mask = (move < count)[:, None]
    word = tl.arange(0, 4)[None, :]
    source = tl.load(src + move, mask=move < count, other=0)
    target = tl.load(dst + move, mask=move < count, other=0)
    records = head
    if tl.program_id(0) == 1:
        records = tail
    moved = tl.load(records + source[:, None] * 4 + word, mask=mask, other=0)
    # Threads of one program run apart: all loads come before any store.
    tl.debug_barrier()
    tl.store(records + target[:, None] * 4 + word, moved, mask=mask)
