"""The line that says where the time of a start went."""

from __future__ import annotations

import pytest

from sglang.srt.utils import start_times
from sglang.srt.utils.start_times import StartTimes
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")


def test_every_second_is_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(start_times.time, "monotonic", lambda: now)
    times = StartTimes(began=97.5)
    times.end("imports")
    for part, seconds in (("graphs", 1.25), ("warm-up", 2.0), ("graphs", 0.25)):
        now += seconds
        times.end(part)
    now += 7.0  # of nothing that has ended
    assert str(times) == "6.0 s (imports 2.5, graphs 1.5, warm-up 2.0)"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
