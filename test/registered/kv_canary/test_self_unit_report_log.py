"""The log of violations: in full once, then counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from violation_world import entry, owner_of, reporter, violation

from kv_canary.checks import Reason
from kv_canary.explain import explain
from kv_canary.report_log import QUIET_SECONDS, ReportLog
from kv_canary.violation import Violation
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")


def violations(
    count: int, *, reason: Reason = Reason.VERIFY_REAL_KV
) -> list[Violation]:
    return [violation(REASONS=reason, SLOT=slot) for slot in range(10, 10 + count)]


def test_an_incident_is_told_once_with_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = reporter(report_dir=tmp_path)
    report.report([entry(SLOT=slot) for slot in range(26)], owner_of=owner_of)
    line, told = caplog.messages
    assert line.startswith("kv_canary violation: ")
    (file,) = tmp_path.iterdir()
    head, _, text = told.partition("\n")
    assert head == f"kv_canary: incident in {file}:"
    assert text == explain(json.loads(file.read_text()))
    # The next one of its kind is counted, whatever request it concerns.
    report.report([entry(SLOT=77, SERIAL=6)], owner_of=owner_of)
    assert len(caplog.messages) == 2 and report.total == 27


def test_a_fault_that_goes_on_has_one_line_per_interval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 1000.0
    log = ReportLog(with_tokens=False, clock=lambda: now)
    assert log.violations(violations(4))
    (first,) = caplog.messages
    assert first == violations(1)[0].line(with_tokens=False)
    for _ in range(30):
        now += 1.0
        assert not log.violations(violations(100))
    assert caplog.messages == [first]
    now += QUIET_SECONDS - 30.0
    caplog.clear()
    assert not log.violations(violations(2))
    line, count = caplog.messages
    assert line == first
    assert count == (
        "kv_canary: 3001 more violation(s) in the last 60 s, 3006 in all, of: "
        f"{violations(1)[0].diagnosis}"
    )


def test_another_diagnosis_is_not_held_back(caplog: pytest.LogCaptureFixture) -> None:
    log = ReportLog(with_tokens=False)
    assert log.violations(violations(3))
    both = violations(3) + violations(3, reason=Reason.READ_SET)
    assert log.violations(both)
    assert len(caplog.messages) == 2
    assert "fail_reason=read_set" in caplog.messages[1]


def of_requests(serials: list[int]) -> list[Violation]:
    return [
        violation(REASONS=Reason.VERIFY_REAL_KV, SLOT=n, SERIAL=serial)
        for n, serial in enumerate(serials, 10)
    ]


def test_each_request_has_a_line_up_to_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A client whose answer was wrong is named, even if the fault is known."""
    now = 1000.0
    log = ReportLog(with_tokens=False, request_lines=4, clock=lambda: now)
    log.violations(of_requests([5, 5, 6]))
    assert caplog.messages == [
        v.line(with_tokens=False) for v in of_requests([5, 0, 6])[::2]
    ]
    caplog.clear()
    now += 1.0
    log.violations(of_requests([6, 5, 7, 7]))
    (line,) = caplog.messages
    assert "slot_idx=12" in line
    # Two of the four lines are left.
    caplog.clear()
    log.violations(of_requests(list(range(20, 30))))
    assert len(caplog.messages) == 2
    caplog.clear()
    now += QUIET_SECONDS
    log.violations(of_requests([5, 40, 41]))
    lines = [line for line in caplog.messages if line.startswith("kv_canary violation")]
    assert len(lines) == 3
    (summary,) = set(caplog.messages) - set(lines)
    held_back = 3 + 8  # of the two steps in between
    assert summary.startswith(f"kv_canary: {held_back} more violation(s)")
    assert " 20 in all" in summary


def test_a_request_has_a_line_for_each_diagnosis(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = ReportLog(with_tokens=False, request_lines=4)
    both = [
        violation(REASONS=r, SERIAL=5) for r in (Reason.READ_SET, Reason.WRITE_TOKEN)
    ]
    log.violations(both)
    log.violations(both)
    assert len(caplog.messages) == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
