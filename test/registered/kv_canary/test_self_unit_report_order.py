"""Findings are reported in one order, whatever order the device's threads had."""

from __future__ import annotations

import random
from typing import Any

import pytest
from violation_world import entry, owner_of, reporter

from kv_canary.checks import Reason
from kv_canary.evidence import DraftBranch
from kv_canary.records import Launch, WriterKind, pack_word3, ring_tag
from kv_canary.violation import Violation
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

TARGET, DRAFT = 0, 1


def findings() -> list[list[int]]:
    """Of two forwards, three launches and a sweep, four rows and three positions."""
    return [
        entry(
            CLOCK=clock,
            TAG=ring_tag(launch, 0, DRAFT),
            BATCH_ROW=row,
            POSITION=position,
            SLOT=100 * clock + 10 * row + position,
            FOUND_WORD3=pack_word3(launch + 1, WriterKind.DECODE, 9),
        )
        for clock in (42, 43)
        for launch in (Launch.SWEEP, Launch.VERIFY, Launch.HEAD, Launch.TAIL)
        for row in range(4)
        for position in (7, 8, 9)
    ]


def reported(entries: list[list[int]]) -> tuple[list[Violation], list[dict[str, Any]]]:
    report = reporter()
    found = report.report(entries, owner_of=owner_of)
    (document,) = report.incidents
    assert document["forward"] == found[0].forward
    return found, document["violations"]


@pytest.mark.parametrize("seed", range(5))
def test_by_forward_launch_row_and_position(seed: int) -> None:
    due, documents = reported(findings())
    places = [(v.forward, v.launch, v.slot) for v in due]
    launches = [launch for _, launch, _ in places]
    assert launches[::12] == ["sweep", "verify", "head", "tail"] * 2
    assert [slot for *_, slot in places[:12]] == sorted(s for *_, s in places[:12])
    shuffled = findings()
    random.Random(seed).shuffle(shuffled)
    assert reported(shuffled) == (due, documents)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_of_branches_with_one_damage_the_first_is_named(is_reversed: bool) -> None:
    """They read the same slot for the same request."""
    entries = [entry(BATCH_ROW=row) for row in (5, 4, 6, 7)]
    if is_reversed:
        entries.reverse()
    (found,), _ = reported(entries)
    assert found.batch_row == 4


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_read_beside_a_wrong_write_blames_the_write(is_reversed: bool) -> None:
    """Attention reads the row's column, 78; the forward writes to 77."""
    read = entry(REASONS=Reason.READ_SET, SLOT=78, EXPECTED_SLOT=77, FOUND_WORD3=0)
    write = entry(REASONS=Reason.WRITE_FOREIGN, TAG=Launch.HEAD)
    other_row = entry(
        REASONS=Reason.READ_SET, SLOT=78, EXPECTED_SLOT=77, FOUND_WORD3=0, SERIAL=6,
        BATCH_ROW=2,
    )  # fmt: skip
    entries = [read, write, other_row]
    found, _ = reported(entries[::-1] if is_reversed else entries)
    assert [(v.batch_row, v.launch, v.diagnosis) for v in found] == [
        (1, "verify", "wrong write slot"),
        (2, "verify", "wrong read table"),
        (1, "head", "wrong write slot"),
    ]


def test_log_and_document_name_the_same_branch() -> None:
    report = reporter()
    (found,) = report.report(
        [entry(BATCH_ROW=7)],
        owner_of=owner_of,
        branch_of=lambda v: DraftBranch(step=2, branch=v.batch_row % 4),
    )
    assert " branch=3 batch_row=7 " in found.line(with_tokens=False)
    (document,) = report.incidents[0]["violations"]
    named = [document[name] for name in ("step", "branch", "batch_row")]
    assert named == [2, 3, 7]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
