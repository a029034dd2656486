"""Triton kernel of the checksums of the state that a draft hands on.

`state` is the tuple from `args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kv_canary.carried import FACTOR as CARRIED_FACTOR
from kv_canary.carried import KEY as CARRIED_KEY
from kv_canary.checks import Reason
from kv_canary.kernels.triton.args import state_args
from kv_canary.kernels.triton.report import RingFinding, report_one
from kv_canary.records import Launch, ring_tag
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from kv_canary.carried import CarriedRows
    from kv_canary.state import CanaryState

CARRIED = tl.constexpr(int(Reason.CARRIED_STATE))
FACTOR = tl.constexpr(CARRIED_FACTOR)
KEY = tl.constexpr(CARRIED_KEY)


@triton.jit
def carried_term(words, place):
    """Return the terms of words at places of their rows."""
    mixed = (words.to(tl.int64) + (place + 1).to(tl.int64) * KEY) * FACTOR
    return mixed ^ (mixed >> 32)


@triton.jit(
    do_not_specialize=["num_rows", "tag", "group", "row_stride", "clock_offset"]
)
def carried_kernel(
    state,
    places,
    req_rows,
    serials,
    positions,
    words,
    ids,
    bits,
    sums,
    num_rows,
    tag,
    group,
    row_stride,
    clock_offset,
    WIDTH: tl.constexpr,
    KNOWN: tl.constexpr,
    KNOWN_BLOCK: tl.constexpr,
    CHECKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Record the sum of one row per program or, with CHECKS, compare it."""
    row = tl.program_id(0).to(tl.int64)
    inside = row < num_rows
    request = row // group
    req = tl.load(req_rows + request, mask=inside, other=0)
    place = tl.load(places + row, mask=inside, other=-1)
    if inside & (req != 0) & (place >= 0):
        serial = tl.load(serials + request)
        found = serial * FACTOR
        found = found ^ (found >> 32)
        if words is not None:
            terms = tl.zeros([BLOCK], dtype=tl.int64)
            for begin in range(0, WIDTH, BLOCK):
                j = begin + tl.arange(0, BLOCK)
                mask = j < WIDTH
                at = words + row * row_stride + j
                term = carried_term(tl.load(at, mask=mask, other=0), j)
                terms += tl.where(mask, term, 0)
            found += tl.sum(terms, axis=0)
        if ids is not None:
            k = tl.arange(0, KNOWN_BLOCK)
            mask = k < KNOWN
            at = row * KNOWN + k
            first = WIDTH + 2 * k
            terms = carried_term(tl.load(ids + at, mask=mask, other=0), first)
            terms += carried_term(tl.load(bits + at, mask=mask, other=0), first + 1)
            found += tl.sum(tl.where(mask, terms, 0), axis=0)
        if CHECKS:
            due = tl.load(sums + place)
            if due != found:
                finding = RingFinding(
                    reasons=CARRIED,
                    req_row=req,
                    serial=serial,
                    slot=-1,
                    position=tl.load(positions + request),
                    expected_word0=None,
                    found_word0=None,
                    expected_lineage=due,
                    found_lineage=found,
                    found_word3=None,
                    clock=tl.load(state.clock) + clock_offset,
                    batch_row=request,
                    expected_slot=-1,
                    found_fingerprint=None,
                    computed_fingerprint=None,
                    tag=tag,
                )
                report_one(state, finding)
        else:
            tl.store(sums + place, found)


_CARRIED_BLOCK = 512


def carry(state: CanaryState, rows: CarriedRows, checks: bool) -> None:
    rows.check_layout()
    count = len(rows.places)
    group, known, width, row_stride, clock_offset = rows.numbers
    carried_kernel[(max(count, 1),)](
        state=state_args(state),
        places=rows.places,
        req_rows=rows.req_rows,
        serials=rows.serials,
        positions=rows.positions,
        words=rows.words,
        ids=rows.ids,
        bits=rows.bits,
        sums=rows.sums,
        num_rows=count,
        tag=ring_tag(Launch.CARRIED, NO_MANAGER, state.pool),
        group=group,
        row_stride=row_stride,
        clock_offset=clock_offset,
        WIDTH=width,
        KNOWN=known,
        KNOWN_BLOCK=triton.next_power_of_2(max(known, 1)),
        CHECKS=checks,
        BLOCK=min(_CARRIED_BLOCK, triton.next_power_of_2(max(width, 1))),
        num_warps=1,
    )
