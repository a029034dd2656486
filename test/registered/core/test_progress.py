"""Progress of a start, in a terminal and out of one."""

from __future__ import annotations

import logging
import sys

import pytest

from sglang.srt.utils import progress
from sglang.srt.utils.progress import with_progress
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

logger = logging.getLogger("sglang.test_progress")


def taken(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    items = with_progress(
        iter(range(4)), total=4, what="Loading weights", unit="tensor", logger=logger
    )
    return list(items)


def test_lines_out_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert taken(False, monkeypatch) == [0, 1, 2, 3]
    assert caplog.messages == [], "it took no five seconds"
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert taken(False, monkeypatch) == [0, 1, 2, 3]
    expected = [f"Loading weights: {number} of 4 tensors" for number in range(4)]
    assert caplog.messages == expected


def test_a_bar_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    assert taken(True, monkeypatch) == [0, 1, 2, 3]
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown and "4/4" in shown
    assert caplog.messages == []


def test_nothing_where_the_log_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    for is_terminal in (False, True):
        assert taken(is_terminal, monkeypatch) == [0, 1, 2, 3]
    assert caplog.messages == [] and capsys.readouterr().err == ""


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
