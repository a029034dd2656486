"""Reports: log line, incident, diagnosis; each damage once."""

from __future__ import annotations

import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from violation_world import (
    NASTY,
    READER,
    WRITER,
    entry,
    incident,
    owner_of,
    reporter,
    violation,
)

from kv_canary import reporter as violation_reporter
from kv_canary.checks import CHECKS, EVERY_REASON, Reason
from kv_canary.evidence import Owner
from kv_canary.explain import explain
from kv_canary.records import (
    POISON_WORD,
    SERIAL_MASK,
    Launch,
    WriterKind,
    pack_word0,
    pack_word3,
)
from kv_canary.reporter import (
    as_error,
)
from kv_canary.serials import REMEMBERED, SerialMap
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

# -- the line ----------------------------------------------------------------------

GOLDEN_LINE = (
    "kv_canary violation: launch_tag=target.verify group=full "
    'fail_reason=verify_lineage+verify_token rid="reader" slot_idx=77 '
    "position=12 page=19 branch=-1 batch_row=1 forward=42 stored_token=101 "
    "expected_token=-1 stored_position=12 stored_lineage=0xffffffffffffffff "
    "expected_lineage=0x0000000000000001 expected_slot=78 writer=decode "
    'writer_forward=40 writer_rid="writer" '
    'diagnosis="aliased with request writer"'
)


def test_the_line() -> None:
    assert violation().line(with_tokens=True) == GOLDEN_LINE


def test_tokens_and_other_requests_are_not_for_everybody() -> None:
    hidden = violation().line(with_tokens=False)
    assert hidden == GOLDEN_LINE.replace("stored_token=101", "stored_token=-1")
    public = violation().public_line()
    assert public == (
        "kv_canary violation: launch_tag=target.verify group=full "
        "fail_reason=verify_lineage+verify_token slot_idx=77 position=12 forward=42"
    )


def test_the_line_of_what_has_no_request_and_no_slot() -> None:
    line = violation(
        REASONS=Reason.PHASE,
        SERIAL=0,
        SLOT=-1,
        POSITION=-1,
        BATCH_ROW=-1,
        FOUND_WORD0=POISON_WORD,
        FOUND_WORD3=0,
        EXPECTED_SLOT=-1,
        TAG=Launch.TAIL | 1 << 8 | 1 << 16,
    ).line(with_tokens=True)
    assert line == (
        "kv_canary violation: launch_tag=draft.tail group=full fail_reason=phase "
        "rid=null "
        "slot_idx=-1 position=-1 page=-1 branch=-1 batch_row=-1 forward=42 "
        "stored_token=-1 expected_token=-1 stored_position=-1 "
        "stored_lineage=0xffffffffffffffff "
        "expected_lineage=0x0000000000000001 expected_slot=-1 writer=none "
        'writer_forward=0 writer_rid=null diagnosis="canary launches out of order"'
    )


def test_a_rid_cannot_break_the_line(caplog: pytest.LogCaptureFixture) -> None:
    reporter(reader=NASTY).report([entry()], dropped=0, owner_of=owner_of)
    message, told = [record.getMessage() for record in caplog.records]
    assert len(message.splitlines()) == 1
    assert not any(line.startswith("kv_canary v") for line in told.splitlines())
    assert f" rid={json.dumps(NASTY)} slot_idx=77 " in message


def test_serials_are_known_modulo_2_to_the_24() -> None:
    (found,) = reporter().report(
        [entry(SERIAL=READER + (1 << 24))], dropped=0, owner_of=owner_of
    )
    assert (found.rid, found.writer_rid) == ("reader", "writer")
    (found,) = reporter().report([entry(SERIAL=7)], dropped=0, owner_of=owner_of)
    assert found.rid is None


# -- the diagnosis -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("reasons", "writer", "diagnosis"),
    [
        (Reason.VERIFY_FREED | Reason.VERIFY_LINEAGE, WRITER, "use after free"),
        (Reason.READ_SET | Reason.VERIFY_TOKEN, WRITER, "wrong read table"),
        (Reason.READ_SCRATCH, WRITER, "wrong read table"),
        (Reason.WRITE_ALIAS, READER, "two tokens of one forward share a slot"),
        (Reason.WRITE_FOREIGN, WRITER, "wrong write slot"),
        (Reason.WRITE_SCRATCH, 0, "write of a live token to the scratch page"),
        (Reason.WRITE_TOKEN, READER, "wrong input of the forward"),
        (Reason.WRITE_POSITION, READER, "wrong input of the forward"),
        (Reason.VERIFY_TORN | Reason.VERIFY_REAL_KV, READER, "torn write"),
        (Reason.VERIFY_POSITION | Reason.VERIFY_LINEAGE, READER, "misplaced"),
        (Reason.VERIFY_REAL_KV, READER, "bytes changed in place"),
        (Reason.VERIFY_LINEAGE, WRITER, "aliased with request writer"),
        (Reason.VERIFY_TOKEN, 11, "aliased with request unknown"),
        (Reason.VERIFY_TOKEN, READER, "stale record"),
        (Reason.VERIFY_LINEAGE, 0, "stale record"),
        (Reason.PHASE, 0, "canary launches out of order"),
    ],
)
def test_diagnosis(reasons: Reason, writer: int, diagnosis: str) -> None:
    word3 = pack_word3(40, WriterKind.EXTEND, writer)
    assert violation(REASONS=reasons, FOUND_WORD3=word3).diagnosis == diagnosis


@pytest.mark.parametrize(
    ("changes", "is_shared", "diagnosis"),
    [
        # A cached prefix, in its place: its tokens are not this request's.
        ({}, True, "stale record"),
        ({"REASONS": Reason.VERIFY_LINEAGE}, True, "stale record"),
        # The other's own slot.
        ({}, False, "aliased with request writer"),
        ({"EXPECTED_SLOT": 76}, True, "aliased with request writer"),
        ({"FOUND_WORD0": pack_word0(1, 13)}, True, "aliased with request writer"),
        # A sweep reads for nobody.
        ({"SERIAL": 0, "TAG": Launch.SWEEP}, True, "stale record"),
    ],
)
def test_a_shared_prefix_is_not_aliased(
    changes: dict[str, int], is_shared: bool, diagnosis: str
) -> None:
    wrong = entry(**{"REASONS": Reason.VERIFY_TOKEN, "EXPECTED_SLOT": 77} | changes)
    (found,) = reporter().report(
        [wrong], dropped=0, owner_of=lambda slot: Owner("x", is_shared=is_shared)
    )
    assert found.diagnosis == diagnosis


def test_a_slot_that_was_never_written() -> None:
    fresh = pack_word3(0, WriterKind.POISON, 0)
    report = reporter()
    freed = entry(REASONS=Reason.VERIFY_FREED, FOUND_WORD3=fresh)
    (found,) = report.report([freed], dropped=0, owner_of=owner_of)
    assert found.diagnosis == "read of a slot that was never written"
    text = explain(report.incidents[0])
    assert "   found     a slot that was never written" in text
    assert "owner was" not in text


def test_every_reason_has_words() -> None:
    assert sorted(check.label for check in CHECKS) == sorted(EVERY_REASON)
    assert all(check.meaning for check in CHECKS)
    assert all(violation(REASONS=reason).diagnosis for reason in Reason)


# -- each damage once --------------------------------------------------------------


def test_the_same_damage_is_reported_once() -> None:
    report = reporter()
    first = report.report([entry(), entry()], dropped=0, owner_of=owner_of)
    assert len(first) == 1
    # The same slot and writer, found again by a later forward.
    assert not report.report([entry(CLOCK=43)], dropped=0, owner_of=owner_of)
    assert (report.total, len(report.incidents)) == (1, 1)
    different = [
        entry(SLOT=78),
        entry(SERIAL=6),
        entry(FOUND_WORD3=pack_word3(41, WriterKind.DECODE, WRITER)),
    ]
    assert len(report.report(different, dropped=0, owner_of=owner_of)) == 3
    assert report.counts == {"verify_lineage": 4, "verify_token": 4}
    assert report.total == 4


def test_memory_of_damage_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(violation_reporter, "REMEMBERED_KEYS", 8)
    report = reporter()
    for slot in range(300):
        report.report([entry(SLOT=slot)], dropped=0, owner_of=owner_of)
    assert len(report.incidents) == violation_reporter.KEPT_INCIDENTS
    assert not report.report([entry(SLOT=299)], dropped=0, owner_of=owner_of)
    assert report.report([entry(SLOT=0)], dropped=0, owner_of=owner_of)


def test_what_did_not_fit_the_ring_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = reporter(ring_capacity=1)
    report.report([entry()], dropped=11, owner_of=owner_of)
    assert report.incidents[-1]["dropped"] == 11
    assert caplog.records[1].getMessage() == (
        "kv_canary: 11 more violations did not fit the ring "
        "(SGLANG_KV_CANARY_RING_CAPACITY=1)"
    )


# -- incidents ---------------------------------------------------------------------


@pytest.mark.parametrize("with_tokens", [False, True])
def test_incident(tmp_path: Path, with_tokens: bool) -> None:
    document = incident(tmp_path, with_tokens=with_tokens)
    assert document.pop("time").endswith("Z")
    expected: dict[str, Any] = {"position": 12, "slot": 78}
    found: dict[str, Any] = {"position": 12}
    if with_tokens:
        expected["token"], found["token"] = None, 101
    assert document == {
        "number": 1,
        "mode": "raise",
        "real_data": "all",
        "rank": 1,
        "forward": 42,
        "forward_mode": "decode",
        "dropped": 0,
        "violations": [
            {
                "worker": "target",
                "group": "full",
                "launch": "verify",
                "rid": "reader",
                "request_row": 3,
                "reasons": ["verify_lineage", "verify_token"],
                "diagnosis": "aliased with request writer",
                "slot": 77,
                "page": 19,
                "position": 12,
                "look_at": "the allocator; the two requests' rows of req_to_token",
                "batch_row": 1,
                "branch": -1,
                "forward": 42,
                "forward_mode": "decode",
                "expected": expected
                | {
                    "lineage": "0x0000000000000001",
                    "fingerprint": "0xfffffffffffffffe",
                },
                "found": found
                | {
                    "lineage": "0xffffffffffffffff",
                    "fingerprint": "0x00000000000000ab",
                },
                "writer": {"kind": "decode", "forward": 40, "rid": "writer"},
                "owner": "owner of 77",
                "first_wrong_position": 8,
            }
        ],
    }


def test_a_folder_that_is_gone_is_logged_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = reporter(report_dir=tmp_path / "gone")
    assert report.report([entry()], dropped=0, owner_of=owner_of)
    assert report.report([entry(SLOT=78)], dropped=0, owner_of=owner_of)
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "kv_canary: cannot write" in line]) == 1
    assert len(report.incidents) == 2
    (tmp_path / "gone").mkdir()
    assert report.report([entry(SLOT=79)], dropped=0, owner_of=owner_of)
    assert len(list((tmp_path / "gone").iterdir())) == 1


@pytest.mark.parametrize("limit", [0, 3])
def test_files_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    report = reporter(report_dir=tmp_path, max_report_files=limit)
    for slot in range(6):
        assert report.report([entry(SLOT=slot)], dropped=0, owner_of=owner_of)
    written = [json.loads(file.read_text()) for file in sorted(tmp_path.iterdir())]
    assert written == list(report.incidents)[: limit or None]
    said = [r.getMessage() for r in caplog.records if "MAX_REPORT" in r.getMessage()]
    assert len(said) == (1 if limit else 0)
    assert all("3 incident files are written" in message for message in said)


def test_a_report_has_its_name_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named_early: list[Path] = []

    class Looking(io.FileIO):
        def write(self, data: Any) -> int:
            count = super().write(data)
            named_early.extend(tmp_path.glob("*.json"))
            return count

    class Failing(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(data[:1])
            raise OSError("no space left")

    report = reporter(report_dir=tmp_path)
    monkeypatch.setattr(os, "fdopen", Looking)
    assert report.report([entry()], dropped=0, owner_of=owner_of)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".json" and named_early == []
    assert json.loads(file.read_text()) == report.incidents[0]
    monkeypatch.setattr(os, "fdopen", Failing)
    assert report.report([entry(SLOT=78)], dropped=0, owner_of=owner_of)
    assert "no space left" in caplog.records[-1].getMessage()
    assert list(tmp_path.iterdir()) == [file]


def test_the_error_of_raise_is_the_first_and_a_count() -> None:
    first = violation()
    alone = as_error([first], with_tokens=False)
    assert str(alone) == first.line(with_tokens=False)
    assert alone.public == first.public_line()
    error = as_error([first, violation(SLOT=3), violation(SLOT=4)], with_tokens=True)
    assert str(error) == first.line(with_tokens=True) + " (2 more violation(s))"
    assert error.public == first.public_line() + " (2 more violation(s))"
    elsewhere = as_error([], with_tokens=False)
    assert "another rank" in str(elsewhere)
    assert elsewhere.public == ""


# -- serials -----------------------------------------------------------------------


def test_the_map_forgets_the_oldest() -> None:
    serials = SerialMap()
    for serial in range(REMEMBERED):
        serials.add(serial, f"r{serial}")
    assert serials.rid(0) == "r0"
    serials.add(0, "again")  # is the newest now
    serials.add(REMEMBERED, "one more")
    assert serials.rid(0) == "again"
    assert serials.rid(1) is None
    assert serials.rid(2) == "r2"
    assert serials.rid(REMEMBERED) == "one more"
    assert serials.rid(REMEMBERED + SERIAL_MASK + 1) == "one more"


def test_violations_are_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reporter().report([entry()], dropped=0, owner_of=owner_of)
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert caplog.messages[0] == GOLDEN_LINE.replace("_token=101", "_token=-1")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
