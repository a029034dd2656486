"""Sums of what a forward leaves for a later one, on every implementation that runs
here."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from canary_world import (
    DEVICE,
    Backend,
    backends,
    each_backend,
    entries,
    findings,
    small_world,
)

from kv_canary.carried import CarriedRows
from kv_canary.checks import Reason
from kv_canary.kernels.reference.carried import carry
from kv_canary.records import Launch, Ring
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=5, suite="cpu")
register_cuda_ci(est_time=5, suite="cuda")

DTYPES = [torch.float32, torch.bfloat16]


def carried(
    *,
    group: int = 1,
    width: int | None = 24,
    topk: int = 3,
    dtype: torch.dtype = torch.float32,
) -> CarriedRows:
    """Three requests, the second one padding."""
    rng = torch.Generator().manual_seed(width or 1)
    count = 3 * group

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE)

    def longs(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=DEVICE)

    return CarriedRows(
        places=longs(range(2, count + 2)),
        req_rows=longs([2, 0, 3]),
        serials=longs([40, 0, 1 << 40]),
        positions=longs([7, 0, 9]),
        hidden=None if width is None else random(count, width).to(dtype),
        ids=longs(torch.arange(count * topk).view(count, topk)) if topk else None,
        probs=random(count, topk) if topk else None,
        sums=longs([0] * 64),
    )


SHAPES = [(1, 24, 3), (1, None, 1), (4, 6, 0), (70, 1096, 0), (1, 2, 2)]


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "width", "topk"), SHAPES)
def test_sums_are_those_of_the_reference(
    backend: Backend, group: int, width: int | None, topk: int, dtype: torch.dtype
) -> None:
    w = small_world()
    rows = carried(group=group, width=width, topk=topk, dtype=dtype)
    rows.sums.zero_()
    if len(rows.places) > 62:
        rows = dataclasses.replace(rows, sums=rows.sums.new_zeros(300))
    backend.launch.carry(w.state, rows, False)
    due = dataclasses.replace(rows, sums=torch.zeros_like(rows.sums))
    carry(w.state, due, False)
    assert torch.equal(rows.sums, due.sums)
    noted = (rows.sums != 0).nonzero().view(-1).tolist()
    live = [*range(group), *range(2 * group, 3 * group)]
    assert noted == [place + 2 for place in live]
    backend.launch.carry(w.state, rows, True)
    assert findings(w.state) == []


def _hidden(rows: CarriedRows) -> None:
    assert rows.hidden is not None
    rows.hidden[2] = rows.hidden[0]


def _ids(rows: CarriedRows) -> None:
    assert rows.ids is not None
    rows.ids[2, 1] += 1


def _probs(rows: CarriedRows) -> None:
    assert rows.probs is not None
    rows.probs[2, 2] *= 1.0001


def _serials(rows: CarriedRows) -> None:
    rows.serials[2] += 1


def _sums(rows: CarriedRows) -> None:
    rows.sums[4] += 1


def _places(rows: CarriedRows) -> None:
    rows.places[2] = 2


CHANGES = [_hidden, _ids, _probs, _serials, _sums, _places]


@each_backend
@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_differs_is_named(backend: Backend, change: Any) -> None:
    w = small_world()
    rows = carried()
    backend.launch.carry(w.state, rows, False)
    change(rows)
    backend.launch.carry(w.state, rows, True)
    assert findings(w.state) == [(Reason.CARRIED_STATE, 3, -1, 9)]
    (entry,) = entries(w.state)
    assert entry[Ring.TAG] & 255 == Launch.CARRIED
    assert entry[Ring.SERIAL] == int(rows.serials[2]) and entry[Ring.BATCH_ROW] == 2
    assert entry[Ring.EXPECTED_LINEAGE] == int(rows.sums[rows.places[2]])
    assert entry[Ring.FOUND_LINEAGE] != entry[Ring.EXPECTED_LINEAGE]
    assert w.state.verdict[:4].tolist() == [0, 0, 0, Reason.CARRIED_STATE]


@each_backend
def test_rows_that_are_left_out_or_padded(backend: Backend) -> None:
    """Neither noted nor compared, whatever they hold."""
    w = small_world()
    rows = carried(group=2)
    rows.places[5] = -1
    backend.launch.carry(w.state, rows, False)
    assert rows.hidden is not None
    rows.hidden[2:4] = rows.hidden[5] = 7
    backend.launch.carry(w.state, rows, True)
    assert findings(w.state) == [] and not rows.sums[4:6].any()


@pytest.mark.parametrize("backend", backends()[1:], ids=lambda b: b.name)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("serials", torch.zeros(2, dtype=torch.int64)),
        ("ids", torch.zeros(2, 3, dtype=torch.int64)),
        ("probs", torch.zeros(3, 3).t()),
        ("hidden", torch.zeros(24, 3).t()),
    ],
)
def test_another_layout_is_refused(
    backend: Backend, name: str, value: torch.Tensor
) -> None:
    """By the kernels: the reference reads tensors of any layout."""
    w = small_world()
    rows = dataclasses.replace(carried(), **{name: value.to(DEVICE)})
    with pytest.raises(ValueError, match=f"CarriedRows: {name}"):
        backend.launch.carry(w.state, rows, True)
