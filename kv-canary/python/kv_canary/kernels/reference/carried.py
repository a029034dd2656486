"""Checksums of the state that a draft hands on, recorded and compared in torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kv_canary.carried import FACTOR, KEY, CarriedRows, CarriedState
from kv_canary.checks import Reason
from kv_canary.kernels.reference.report import Report, flag
from kv_canary.records import Launch, Ring
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState


def carry(state: CanaryState, carried: CarriedState) -> None:
    """Compare the state that a forward uses with the state that was made for it, and
    record the state that a later forward will use, in one launch. A row whose sum
    differs is a CARRIED_STATE, with the sums as lineages."""
    if carried.checked is not None:
        _check(state, carried, carried.checked)
    noted = carried.noted
    if noted is not None:
        assert noted.sums is not None
        live = _is_carried(carried, noted)
        noted.sums[noted.find_places()[live]] = _sum_rows(carried, noted)[live]


def _check(state: CanaryState, carried: CarriedState, rows: CarriedRows) -> None:
    live, found = _is_carried(carried, rows), _sum_rows(carried, rows)
    due = _due_sums(carried, rows)
    request = torch.arange(len(found), device=found.device) // rows.group
    report = Report(
        state, Launch.CARRIED, NO_MANAGER, clock_offset=carried.clock_offset
    )
    report.add(
        {
            Ring.REASONS: flag(Reason.CARRIED_STATE, live & (due != found)),
            Ring.REQ_ROW: carried.req_rows[request],
            Ring.SERIAL: carried.serials[request],
            Ring.POSITION: carried.positions[request],
            Ring.EXPECTED_LINEAGE: due,
            Ring.FOUND_LINEAGE: found,
            Ring.BATCH_ROW: request,
        }
    )


def _is_carried(carried: CarriedState, rows: CarriedRows) -> Tensor:
    """Return which rows count, that is, are neither padding nor left out."""
    return ((carried.req_rows != 0)[:, None] & (rows.places >= 0)).flatten()


def _due_sums(carried: CarriedState, rows: CarriedRows) -> Tensor:
    """Return the sum that each row must have; 0 if its place is outside of `source`."""
    places = rows.find_places()
    if rows.sums is not None:
        return rows.sums[places.clamp(min=0)]
    assert rows.source is not None
    inside = places.clamp(0, rows.num_places - 1)
    copied = replace(rows, hidden=rows.source[inside])
    return _sum_rows(carried, copied).where(inside == places, 0)


def _sum_rows(carried: CarriedState, rows: CarriedRows) -> Tensor:
    words = [carried.serials.repeat_interleave(rows.group)]
    if rows.words is not None:
        words += rows.words.long().unbind(1)
    if rows.ids is not None and rows.bits is not None:
        for k in range(rows.known):
            words += [rows.ids[:, k], rows.bits[:, k].long()]
    return sum_words(torch.stack(words, dim=1), first=-1)


def sum_words(words: Tensor, *, first: int = 0) -> Tensor:
    """Return the sum of each row of int64 words, whose places begin at `first`."""
    places = torch.arange(first + 1, first + 1 + words.shape[1], device=words.device)
    mixed = (words + places * KEY) * FACTOR
    return (mixed ^ (mixed >> 32)).sum(dim=1)
