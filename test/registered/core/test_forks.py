"""Work in forks is done once, whatever some of it does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sglang.srt.utils import forks
from sglang.srt.utils.forks import BackgroundFork, in_processes
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

COUNT = 40


def test_every_number_has_its_turn_elsewhere(tmp_path: Path) -> None:
    def work(number: int) -> None:
        (tmp_path / f"{number}-{os.getpid()}").touch(exist_ok=False)

    in_processes(work, COUNT)
    done = [name.split("-") for name in os.listdir(tmp_path)]
    assert sorted(int(number) for number, _ in done) == list(range(COUNT))
    assert str(os.getpid()) not in {pid for _, pid in done}


def test_what_fails_is_said_and_the_rest_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(number: int) -> None:
        if number == 3:
            raise KeyError("the third")
        (tmp_path / str(number)).touch()

    in_processes(work, COUNT)
    assert len(os.listdir(tmp_path)) == COUNT - 1
    assert "the third" in capfd.readouterr().err
    assert [r.getMessage() for r in caplog.records] == [
        "1 of the forked processes failed"
    ]


def test_a_fork_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE_SECONDS", 0.2)
    began = time.monotonic()
    in_processes(lambda number: time.sleep(60), 1)
    assert time.monotonic() - began < 30


def test_work_in_the_background(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        number = file.fileno()
        fork = BackgroundFork(lambda: os.fstat(number))
        assert fork.wait(60) is False, "files of the parent are closed"
    fork = BackgroundFork(lambda: (tmp_path / "done").touch())
    assert fork.wait(60) is True
    assert (tmp_path / "done").exists()
    fork = BackgroundFork(lambda: time.sleep(60), patience=0.1)
    assert fork.poll() is None
    assert fork.wait(30) is False


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
