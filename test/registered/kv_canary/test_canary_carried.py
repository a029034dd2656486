"""Sums of what a forward leaves for a later one, on every implementation that runs
here."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

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

from kv_canary.carried import CandidateGroups, CarriedRows, CarriedState
from kv_canary.checks import Reason
from kv_canary.kernels.reference.carried import carry
from kv_canary.records import Launch, Ring
from kv_canary.state import CanaryState
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=8, suite="cpu")
register_cuda_ci(est_time=8, suite="cuda")

DTYPES = [torch.float32, torch.bfloat16]


def longs(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device=DEVICE)


def requests(
    *, checked: CarriedRows | None = None, noted: CarriedRows | None = None
) -> CarriedState:
    """Three requests, the second one padding."""
    return CarriedState(
        req_rows=longs([2, 0, 3]),
        serials=longs([40, 0, 1 << 40]),
        positions=longs([7, 0, 9]),
        checked=checked,
        noted=noted,
    )


def carried(
    *,
    group: int = 1,
    width: int | None = 24,
    topk: int = 3,
    dtype: torch.dtype = torch.float32,
) -> CarriedRows:
    """Rows of three requests."""
    rng = torch.Generator().manual_seed(width or 1)
    count = 3 * group

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE)

    return CarriedRows(
        places=longs(range(2, count + 2)).view(3, group),
        hidden=None if width is None else random(count, width).to(dtype),
        ids=longs(torch.arange(count * topk).view(count, topk)) if topk else None,
        probs=random(count, topk) if topk else None,
        sums=longs([0] * 64),
    )


class Carried(NamedTuple):
    """Notes rows, then checks them, in one implementation."""

    backend: Backend
    state: CanaryState
    rows: CarriedRows

    def note(self) -> None:
        self.backend.launch.carry(self.state, requests(noted=self.rows))

    def check(self) -> None:
        self.backend.launch.carry(self.state, requests(checked=self.rows))


SHAPES = [(1, 24, 3), (1, None, 1), (4, 6, 0), (70, 1096, 0), (1, 2, 2)]


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "width", "topk"), SHAPES)
def test_sums_are_those_of_the_reference(
    backend: Backend, group: int, width: int | None, topk: int, dtype: torch.dtype
) -> None:
    w = small_world()
    rows = carried(group=group, width=width, topk=topk, dtype=dtype)
    assert rows.sums is not None
    if rows.places.numel() > 62:
        rows = dataclasses.replace(rows, sums=rows.sums.new_zeros(300))
    assert rows.sums is not None
    made = Carried(backend, w.state, rows)
    made.note()
    due = torch.zeros_like(rows.sums)
    carry(w.state, requests(noted=dataclasses.replace(rows, sums=due)))
    assert torch.equal(rows.sums, due)
    noted = (rows.sums != 0).nonzero().view(-1).tolist()
    live = [*range(group), *range(2 * group, 3 * group)]
    assert noted == [place + 2 for place in live]
    made.check()
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


def _sums(rows: CarriedRows) -> None:
    assert rows.sums is not None
    rows.sums[4] += 1


def _places(rows: CarriedRows) -> None:
    rows.places[2] = 2


CHANGES = [_hidden, _ids, _probs, _sums, _places]


@each_backend
@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_differs_is_named(backend: Backend, change: Any) -> None:
    w = small_world()
    made = Carried(backend, w.state, carried())
    made.note()
    change(made.rows)
    made.check()
    assert findings(w.state) == [(Reason.CARRIED_STATE, 3, -1, 9)]
    (entry,) = entries(w.state)
    rows, serials = made.rows, requests().serials
    assert rows.sums is not None
    assert entry[Ring.TAG] & 255 == Launch.CARRIED
    assert entry[Ring.SERIAL] == int(serials[2]) and entry[Ring.BATCH_ROW] == 2
    assert entry[Ring.EXPECTED_LINEAGE] == int(rows.sums[rows.places[2, 0]])
    assert entry[Ring.FOUND_LINEAGE] != entry[Ring.EXPECTED_LINEAGE]
    assert w.state.verdict[:4].tolist() == [0, 0, 0, Reason.CARRIED_STATE]


@each_backend
def test_state_of_another_request_is_named(backend: Backend) -> None:
    w = small_world()
    made = Carried(backend, w.state, carried())
    made.note()
    others = requests(checked=made.rows)
    others.serials[2] += 1
    backend.launch.carry(w.state, others)
    assert findings(w.state) == [(Reason.CARRIED_STATE, 3, -1, 9)]
    (entry,) = entries(w.state)
    assert entry[Ring.SERIAL] == int(others.serials[2])


@each_backend
def test_rows_that_are_left_out_or_padded(backend: Backend) -> None:
    """Neither noted nor compared, whatever they hold."""
    w = small_world()
    made = Carried(backend, w.state, carried(group=2))
    rows = made.rows
    assert rows.hidden is not None and rows.sums is not None
    rows.places[2, 1] = -1
    made.note()
    rows.hidden[2:4] = rows.hidden[5] = 7
    made.check()
    assert findings(w.state) == [] and not rows.sums[4:6].any()


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_checks_rows_and_notes_others(
    backend: Backend, dtype: torch.dtype
) -> None:
    """Of other widths, in groups of other sizes, with and without candidates."""
    w = small_world()
    first = carried(dtype=dtype)
    second = dataclasses.replace(
        carried(group=5, width=70, topk=0, dtype=dtype), sums=first.sums
    )
    second.places += 20
    assert first.sums is not None and first.hidden is not None
    both = requests(checked=first, noted=second)
    Carried(backend, w.state, first).note()
    backend.launch.carry(w.state, both)
    assert findings(w.state) == []
    Carried(backend, w.state, second).check()
    assert findings(w.state) == []
    due = torch.zeros_like(first.sums)
    for rows in (first, second):
        carry(w.state, requests(noted=dataclasses.replace(rows, sums=due)))
    assert torch.equal(first.sums, due)
    first.hidden[0, 5] += 1
    backend.launch.carry(w.state, both)
    assert findings(w.state) == [(Reason.CARRIED_STATE, 2, -1, 7)]


TOPK, NUM_GROUPS = 3, 7


def _chosen(parents: list[list[int]]) -> CarriedRows:
    """Rows at the candidates in the middle columns of a wider table."""
    table = longs([[-1] * (len(row) + 4) for row in parents])
    table[:, 2:-2] = longs(parents)
    return dataclasses.replace(
        carried(group=len(parents[0]), width=10, topk=0),
        places=table[:, 2:-2],
        groups=CandidateGroups(NUM_GROUPS, TOPK),
    )


@each_backend
def test_candidates_belong_to_the_places_of_their_groups(backend: Backend) -> None:
    w = small_world()
    rows = _chosen([[0, 4, 20], [0, 0, 0], [5, 6, 3]])
    assert rows.sums is not None and rows.hidden is not None
    rows.hidden[8] = rows.hidden[6]  # candidates 5 and 3 are of one group
    # Groups 0, 1, 6 of the first request; 1, 2, 1 of the third one.
    places = longs([[0, 1, 6], [0, 0, 0], [15, 16, 15]])
    sources = dataclasses.replace(rows, places=places, groups=None)
    Carried(backend, w.state, sources).note()
    made = Carried(backend, w.state, rows)
    made.check()
    assert findings(w.state) == []
    assert rows.sums.nonzero().view(-1).tolist() == [0, 1, 6, 15, 16]
    rows.places[2, 0] = 6
    made.check()
    assert findings(w.state) == [(Reason.CARRIED_STATE, 3, -1, 9)]
    (entry,) = entries(w.state)
    assert entry[Ring.EXPECTED_LINEAGE] == int(rows.sums[16])


SOURCE_ROWS = 9


def _copied(dtype: torch.dtype = torch.float32, width: int = 24) -> CarriedRows:
    """The last rows of sequences of 2, 3 and 4 rows."""
    rng = torch.Generator().manual_seed(7)
    # In rows of a wider tensor, as the head's may be.
    wide = torch.randn(SOURCE_ROWS, width + 8, generator=rng).to(DEVICE, dtype)
    source = wide[:, :width]
    return CarriedRows(
        places=longs([[0], [2], [5]]),
        lens=longs([2, 3, 4]),
        hidden=source[longs([1, 4, 8])],
        source=source,
    )


@each_backend
@pytest.mark.parametrize("width", [2, 24, 1030])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_compared_with_their_source(
    backend: Backend, dtype: torch.dtype, width: int
) -> None:
    w = small_world()
    rows = _copied(dtype, width)
    assert rows.hidden is not None and rows.source is not None
    rows.hidden[1] = 5  # padding
    made = Carried(backend, w.state, rows)
    made.check()
    assert findings(w.state) == []
    rows.hidden[2] = rows.source[7]
    made.check()
    assert findings(w.state) == [(Reason.CARRIED_STATE, 3, -1, 9)]
    sums = longs([0] * SOURCE_ROWS)
    noted = CarriedRows(places=longs([[0], [1], [8]]), hidden=rows.hidden, sums=sums)
    carry(w.state, requests(noted=noted))
    (entry,) = entries(w.state)
    assert entry[Ring.FOUND_LINEAGE] == int(sums[8])
    due = dataclasses.replace(noted, hidden=rows.source[longs([1, 4, 8])])
    carry(w.state, requests(noted=due))
    assert entry[Ring.EXPECTED_LINEAGE] == int(sums[8])


@each_backend
@pytest.mark.parametrize("length", [-5, 5, 1 << 40])
def test_a_source_that_is_not_there_is_a_finding(backend: Backend, length: int) -> None:
    """Memory outside of the source is not read."""
    w = small_world()
    rows = _copied()
    assert rows.lens is not None
    rows.lens[2] = length
    Carried(backend, w.state, rows).check()
    assert findings(w.state) == [(Reason.CARRIED_STATE, 3, -1, 9)]
    (entry,) = entries(w.state)
    assert entry[Ring.EXPECTED_LINEAGE] == 0


@each_backend
def test_rows_without_a_source_are_left_out(backend: Backend) -> None:
    """As places of a path after its end, and a length of padding that is 0."""
    w = small_world()
    rows = _copied()
    assert rows.hidden is not None and rows.lens is not None
    rows.places[2] = -1
    rows.hidden[2] = 3
    rows.lens[1] = 0
    Carried(backend, w.state, rows).check()
    assert findings(w.state) == []


@pytest.mark.parametrize("backend", backends()[1:], ids=lambda b: b.name)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("serials", torch.zeros(2, dtype=torch.int64)),
        ("places", torch.zeros(2, 1, dtype=torch.int64)),
        ("places", torch.zeros(1, 3, dtype=torch.int64).t()[:, ::2]),
        ("ids", torch.zeros(2, 3, dtype=torch.int64)),
        ("probs", torch.zeros(3, 3).t()),
        ("hidden", torch.zeros(24, 3).t()),
        ("lens", torch.zeros(2, dtype=torch.int64)),
        ("source", torch.zeros(24, 5).t()),
        ("sums", None),
    ],
)
def test_another_layout_is_refused(backend: Backend, name: str, value: Any) -> None:
    """By the kernels: the reference reads tensors of any layout."""
    w = small_world()
    changes = {name: None if value is None else value.to(DEVICE)}
    made = requests(checked=carried())
    if name == "serials":
        made = dataclasses.replace(made, **changes)
    else:
        assert made.checked is not None
        made.checked = dataclasses.replace(made.checked, **changes)
    reason = "give either sums" if name in ("source", "sums") else name
    with pytest.raises(ValueError, match=f"CarriedRows: .*{reason}"):
        backend.launch.carry(w.state, made)


@pytest.mark.parametrize("backend", backends()[1:], ids=lambda b: b.name)
def test_rows_are_noted_in_sums_alone(backend: Backend) -> None:
    w = small_world()
    with pytest.raises(ValueError, match="noted rows need sums"):
        Carried(backend, w.state, _copied()).note()
    wider = _copied(width=26).source
    with pytest.raises(ValueError, match="the words of hidden alone"):
        Carried(backend, w.state, dataclasses.replace(_copied(), source=wider)).check()
