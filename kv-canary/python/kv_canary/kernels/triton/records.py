"""Changes of records outside a forward in Triton: poison and moves."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kv_canary.kernels.triton.grid import cdiv
from kv_canary.kernels.triton.hash import POISON, pack_word3
from kv_canary.records import WriterKind

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState

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


@triton.jit(
    do_not_specialize=["num_slots", "count"], do_not_specialize_on_alignment=["slots"]
)
def announce_kernel(head, tail, slots, num_slots, count, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + lane, mask=lane < count, other=-1)
    inside = ((slot >= 0) & (slot < num_slots))[:, None]
    word = slot[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(tail + word, tl.load(head + word, mask=inside, other=0), mask=inside)


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
    # Threads of a program drift apart, so all loads come before any store.
    tl.debug_barrier()
    tl.store(records + target[:, None] * 4 + word, moved, mask=mask)


MOVE_SIZES = (64, 512, 1024)
"""Numbers of moves that the kernel is compiled for."""
MAX_MOVES = MOVE_SIZES[-1]
"""Most moves that one program holds in registers."""
_POISON_BLOCK = 128
_ANNOUNCED_AT_ONCE = 128


def poison(state: CanaryState, slots: Tensor, n_live: Tensor | None) -> None:
    count = slots.numel()
    poison_kernel[(cdiv(count, _POISON_BLOCK), 2)](
        state.head,
        state.tail,
        state.clock,
        slots,
        slots if n_live is None else n_live,
        state.num_slots,
        count,
        HAS_LIVE=n_live is not None,
        BLOCK=_POISON_BLOCK,
    )


def announce_heads(state: CanaryState, slots: Tensor) -> None:
    count = slots.numel()
    announce_kernel[(cdiv(count, _ANNOUNCED_AT_ONCE),)](
        state.head,
        state.tail,
        slots,
        state.num_slots,
        count,
        BLOCK=_ANNOUNCED_AT_ONCE,
    )


def move_records(state: CanaryState, dst: Tensor, src: Tensor) -> None:
    """Move records. More than `MAX_MOVES` are copied in torch, which allocates."""
    count = dst.numel()
    if count > MAX_MOVES:
        for records in (state.head, state.tail):
            records.index_copy_(0, dst, records.index_select(0, src))
        return
    size = next(size for size in MOVE_SIZES if count <= size)
    move_kernel[(2,)](state.head, state.tail, dst, src, count, MOVES=size)
