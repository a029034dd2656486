"""Checksums of the state that a draft hands on, recorded and compared in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kv_canary.carried import FACTOR, KEY, CarriedRows
from kv_canary.checks import Reason
from kv_canary.kernels.reference.report import Report, flag
from kv_canary.records import Launch, Ring
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState


def carry(state: CanaryState, rows: CarriedRows, checks: bool) -> None:
    """Record the sums of rows or, with `checks`, compare them with recorded ones."""
    live, found = _is_carried(rows), _carried_sum(rows)
    if not checks:
        rows.sums[rows.places[live]] = found[live]
        return
    due = rows.sums[rows.places.clamp(min=0)]
    request = torch.arange(len(rows.places), device=rows.places.device) // rows.group
    report = Report(state, Launch.CARRIED, NO_MANAGER, clock_offset=rows.clock_offset)
    report.add(
        {
            Ring.REASONS: flag(Reason.CARRIED_STATE, live & (due != found)),
            Ring.REQ_ROW: rows.req_rows[request],
            Ring.SERIAL: rows.serials[request],
            Ring.POSITION: rows.positions[request],
            Ring.EXPECTED_LINEAGE: due,
            Ring.FOUND_LINEAGE: found,
            Ring.BATCH_ROW: request,
        }
    )


def _is_carried(rows: CarriedRows) -> Tensor:
    """Return which rows count, that is, are neither padding nor left out."""
    return (rows.req_rows != 0).repeat_interleave(rows.group) & (rows.places >= 0)


def _carried_sum(rows: CarriedRows) -> Tensor:
    _, known, *_ = rows.numbers
    words = [rows.serials.repeat_interleave(rows.group)]
    if rows.words is not None:
        words += rows.words.long().unbind(1)
    if rows.ids is not None and rows.bits is not None:
        for k in range(known):
            words += [rows.ids[:, k], rows.bits[:, k].long()]
    return sum_words(torch.stack(words, dim=1), first=-1)


def sum_words(words: Tensor, *, first: int = 0) -> Tensor:
    """Return the sum of each row of int64 words, whose places begin at `first`."""
    places = torch.arange(first + 1, first + 1 + words.shape[1], device=words.device)
    mixed = (words + places * KEY) * FACTOR
    return (mixed ^ (mixed >> 32)).sum(dim=1)
