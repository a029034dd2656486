"""Triton kernel of the checksums of the state that a draft hands on.

`state` is the tuple from `args.py`; SHAPE is a `RowShape`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kv_canary.carried import FACTOR as CARRIED_FACTOR
from kv_canary.carried import KEY as CARRIED_KEY
from kv_canary.checks import Reason
from kv_canary.kernels.triton.args import state_args
from kv_canary.kernels.triton.report import RingFinding, report_one
from kv_canary.records import Launch, ring_tag
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from kv_canary.carried import CarriedRows, CarriedState
    from kv_canary.state import CanaryState

CARRIED = tl.constexpr(int(Reason.CARRIED_STATE))
FACTOR = tl.constexpr(CARRIED_FACTOR)
KEY = tl.constexpr(CARRIED_KEY)


class Part(NamedTuple):
    """The tensors of `CarriedRows` except places and lens, and the elements between
    their rows. The numbers of groups are None without groups."""

    words: Tensor | None
    row_stride: int
    ids: Tensor | None
    bits: Tensor | None
    sums: Tensor | None
    source: Tensor | None
    source_stride: int
    group: int
    place_stride: int
    num_groups: int | None
    topk: int | None


class Requests(NamedTuple):
    """int64 [b] each, as in `CarriedState`."""

    req_rows: Any
    serials: Any
    positions: Any


class RowShape(NamedTuple):
    """Compile-time facts of rows: words of a hidden state, and how many are loaded at
    a time; candidates, and their number rounded up to a power of 2."""

    width: int
    block: int
    known: int
    known_block: int


@triton.jit
def carried_term(words, place):
    """Return the terms of words at places of their rows."""
    mixed = (words.to(tl.int64) + (place + 1).to(tl.int64) * KEY) * FACTOR
    return mixed ^ (mixed >> 32)


@triton.jit
def _sum_hidden(words, serial, SHAPE: tl.constexpr):
    """Return the sum of a request's serial and of the words of a hidden state."""
    first = serial * FACTOR
    total = first ^ (first >> 32)
    if words is not None:
        BLOCK: tl.constexpr = SHAPE.block
        terms = tl.zeros([BLOCK], dtype=tl.int64)
        for begin in range(0, SHAPE.width, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            mask = j < SHAPE.width
            term = carried_term(tl.load(words + j, mask=mask, other=0), j)
            terms += tl.where(mask, term, 0)
        total += tl.sum(terms, axis=0)
    return total


@triton.jit
def _sum_row(part, row, serial, SHAPE: tl.constexpr):
    if part.words is None:
        total = _sum_hidden(None, serial, SHAPE)
    else:
        total = _sum_hidden(part.words + row * part.row_stride, serial, SHAPE)
    if part.ids is not None:
        k = tl.arange(0, SHAPE.known_block)
        mask = k < SHAPE.known
        at = row * SHAPE.known + k
        first = SHAPE.width + 2 * k
        terms = carried_term(tl.load(part.ids + at, mask=mask, other=0), first)
        terms += carried_term(tl.load(part.bits + at, mask=mask, other=0), first + 1)
        total += tl.sum(tl.where(mask, terms, 0), axis=0)
    return total


@triton.jit
def _load_place(part, places, lens, row):
    """Load the place that a row belongs to, and whether one was given."""
    request = row // part.group
    given = tl.load(places + request * part.place_stride + row % part.group)
    place = given
    if part.topk is not None:
        place = request * part.num_groups + given // part.topk
    if lens is not None:
        place += tl.load(lens + request) - 1
    return place, given >= 0


@triton.jit
def _due_sum(part, place, serial, num_places, SHAPE: tl.constexpr):
    """Return the sum that a row of this place must have; 0 for a place outside."""
    inside = (place >= 0) & (place < num_places)
    if part.source is None:
        due = tl.load(part.sums + place, mask=inside, other=0)
    else:
        due = place * 0
        if inside:
            source = part.source + place * part.source_stride
            due = _sum_hidden(source, serial, SHAPE)
    return due


@triton.jit
def _check_row(
    state,
    part,
    requests,
    places,
    lens,
    row,
    num_rows,
    num_places,
    tag,
    clock_offset,
    SHAPE: tl.constexpr,
):
    """Report the row if it is one of `num_rows` and has another sum than is due."""
    if row < num_rows:
        request = row // part.group
        req = tl.load(requests.req_rows + request)
        place, is_given = _load_place(part, places, lens, row)
        if (req != 0) & is_given:
            serial = tl.load(requests.serials + request)
            found = _sum_row(part, row, serial, SHAPE)
            due = _due_sum(part, place, serial, num_places, SHAPE)
            if due != found:
                finding = RingFinding(
                    reasons=CARRIED,
                    req_row=req,
                    serial=serial,
                    slot=-1,
                    position=tl.load(requests.positions + request),
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


@triton.jit
def _note_row(part, requests, places, row, num_places, SHAPE: tl.constexpr):
    """Record the sum of the row if it is one, that is, not negative."""
    if row >= 0:
        request = row // part.group
        req = tl.load(requests.req_rows + request)
        place, is_given = _load_place(part, places, None, row)
        if (req != 0) & is_given & (place < num_places):
            serial = tl.load(requests.serials + request)
            tl.store(part.sums + place, _sum_row(part, row, serial, SHAPE))


@triton.jit(
    do_not_specialize=[
        *("num_checked", "checked_places", "noted_places", "tag", "clock_offset"),
    ],
    do_not_specialize_on_alignment=[
        *("checked_at", "noted_at", "lens", "req_rows", "serials", "positions"),
    ],
)
def carried_kernel(
    state,
    checked,
    noted,
    checked_at,
    noted_at,
    lens,
    req_rows,
    serials,
    positions,
    num_checked,
    checked_places,
    noted_places,
    tag,
    clock_offset,
    CHECKED: tl.constexpr,
    NOTED: tl.constexpr,
):
    """Compare or record the sum of one row per program, the checked rows first.

    CHECKED and NOTED are the shapes of the rows, or None if there are none.
    """
    row = tl.program_id(0).to(tl.int64)
    requests = Requests(req_rows=req_rows, serials=serials, positions=positions)
    if CHECKED is not None:
        _check_row(
            state,
            checked,
            requests,
            checked_at,
            lens,
            row,
            num_checked,
            checked_places,
            tag,
            clock_offset,
            CHECKED,
        )
    if NOTED is not None:
        _note_row(noted, requests, noted_at, row - num_checked, noted_places, NOTED)


_CARRIED_BLOCK = 2048
# Few rows fill a small part of the device, so a row gets as many threads as it can use.
_WORDS_PER_WARP = 256


def carry(state: CanaryState, carried: CarriedState) -> None:
    carried.check_layout()
    checked, noted = carried.checked, carried.noted
    num_checked = _num_rows(checked)
    count = num_checked + _num_rows(noted)
    if not count:
        return
    shapes = _row_shape(checked), _row_shape(noted)
    block = max(shape.block for shape in shapes if shape is not None)
    carried_kernel[(count,)](
        state=state_args(state),
        checked=_part_args(checked),
        noted=_part_args(noted),
        checked_at=None if checked is None else checked.places,
        noted_at=None if noted is None else noted.places,
        lens=None if checked is None else checked.lens,
        req_rows=carried.req_rows,
        serials=carried.serials,
        positions=carried.positions,
        num_checked=num_checked,
        checked_places=0 if checked is None else checked.num_places,
        noted_places=0 if noted is None else noted.num_places,
        tag=ring_tag(Launch.CARRIED, NO_MANAGER, state.pool),
        clock_offset=carried.clock_offset,
        CHECKED=shapes[0],
        NOTED=shapes[1],
        num_warps=max(block // _WORDS_PER_WARP, 1),
    )


def _num_rows(rows: CarriedRows | None) -> int:
    return 0 if rows is None else rows.places.numel()


def _part_args(rows: CarriedRows | None) -> Part | None:
    if rows is None:
        return None
    groups = rows.groups
    return Part(
        words=rows.words,
        row_stride=_stride(rows.words),
        ids=rows.ids,
        bits=rows.bits,
        sums=rows.sums,
        source=rows.source_words,
        source_stride=_stride(rows.source_words),
        group=rows.group,
        place_stride=rows.places.stride(0),
        num_groups=None if groups is None else groups.num_groups,
        topk=None if groups is None else groups.topk,
    )


def _row_shape(rows: CarriedRows | None) -> RowShape | None:
    if rows is None:
        return None
    return RowShape(
        width=rows.width,
        block=min(_CARRIED_BLOCK, triton.next_power_of_2(max(rows.width, 1))),
        known=rows.known,
        known_block=triton.next_power_of_2(max(rows.known, 1)),
    )


def _stride(t: Tensor | None) -> int:
    """Return the elements between rows; those of a row if it is the only one, so that
    one row and many share a compilation."""
    if t is None:
        return 0
    return t.stride(0) if t.shape[0] > 1 else t.shape[1]
