"""Work in forks is done once, whatever some of it does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang.srt.utils import forks
from sglang.srt.utils.forks import BackgroundFork, Workers
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

COUNT = 40


def do_all(work: Callable[[bytes], object]) -> None:
    workers = Workers(work)
    for number in range(COUNT):
        workers.give(str(number).encode())
    workers.finish()


def test_every_task_is_done_once_elsewhere(tmp_path: Path) -> None:
    def work(task: bytes) -> None:
        (tmp_path / f"{task.decode()}-{os.getpid()}").touch(exist_ok=False)

    do_all(work)
    done = [name.split("-") for name in os.listdir(tmp_path)]
    assert sorted(int(number) for number, _ in done) == list(range(COUNT))
    assert str(os.getpid()) not in {pid for _, pid in done}


def test_tasks_are_done_while_more_are_given(tmp_path: Path) -> None:
    workers = Workers(lambda task: (tmp_path / task.decode()).touch())
    for name in ("first", "second"):
        workers.give(name.encode())
        deadline = time.monotonic() + 30
        while not (tmp_path / name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    workers.finish()


def test_what_fails_is_said_and_the_rest_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(task: bytes) -> None:
        if task == b"3":
            raise KeyError("the third")
        (tmp_path / task.decode()).touch()

    do_all(work)
    assert len(os.listdir(tmp_path)) == COUNT - 1
    assert "the third" in capfd.readouterr().err
    assert [r.getMessage() for r in caplog.records] == [
        "1 of the forked processes failed"
    ]


def test_a_fork_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE_SECONDS", 0.2)
    began = time.monotonic()
    do_all(lambda task: time.sleep(60))
    workers = Workers(lambda task: time.sleep(60))
    workers.give(b"1")
    workers.cancel()
    assert time.monotonic() - began < 30


def test_without_forks_the_work_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    do_all(lambda task: None)
    first, second = (r.getMessage() for r in caplog.records)
    assert first == "0 processes have to do: no more processes"
    assert second.startswith("The forked processes take no more work: ")


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
