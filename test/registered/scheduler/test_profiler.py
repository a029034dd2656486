"""Profiles of a scheduler: what is written, and when they are refused."""

from __future__ import annotations

import gzip
import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.managers.messages.io_struct import (
    GetStateReq,
    GetStateRsp,
    ProfileReq,
    ProfileRsp,
    ShutdownReq,
)
from sglang.srt.managers.scheduler import profiler
from sglang.srt.managers.scheduler.profiler import MAX_SECONDS
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=8, suite="cpu")


class Profiled:
    """An engine whose profiles go to `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = write_mock_model(
            folder / "mock", vocab_size=100, max_position_embeddings=256
        )
        self.engine = EngineHarness(model, skip_tokenizer_init=True)

    def ask(self, *, is_start: bool, **options: Any) -> ProfileRsp:
        options = {
            "folder": str(self.folder / "traces"),
            "activities": ["CPU", "GPU"],
            "num_steps": 100,
            "with_stack": False,
        } | options
        self.engine.io.requests.append(
            ProfileReq(call_id=7, is_start=is_start, **options)
        )
        self.engine.scheduler.step()
        return self.await_answer()

    def await_answer(self) -> ProfileRsp:
        """Let the scheduler turn until it answers."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            answers = [m for m in self.engine.io.responses if type(m) is ProfileRsp]
            if answers:
                self.engine.io.responses.clear()
                (answer,) = answers
                assert answer.call_id == 7
                return answer
            self.engine.scheduler.step()
            time.sleep(0.01)
        raise AssertionError("no answer")

    def trace(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "traces" / f"{name}-TP-0.trace.json.gz"
        with gzip.open(path) as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        return events


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    return Profiled(tmp_path_factory.mktemp("profiler"))


def num_operators(events: list[dict[str, Any]]) -> int:
    return sum(event.get("cat") == "cpu_op" for event in events)


def test_from_start_to_stop(profiled: Profiled) -> None:
    started = profiled.ask(is_start=True, name="whole")
    assert started.error is None
    assert profiled.engine.generate([1, 2, 3], max_new_tokens=4).output_ids
    assert "runs already" in (profiled.ask(is_start=True, name="second").error or "")
    stopped = profiled.ask(is_start=False)
    assert stopped == started
    assert num_operators(profiled.trace("whole")) > 0
    folder = profiled.folder / "traces"
    assert [path.name for path in folder.iterdir()] == ["whole-TP-0.trace.json.gz"]
    assert stat.S_IMODE(Path(stopped.path).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "no profile runs" in (profiled.ask(is_start=False).error or "")


def wait_written(profiled: Profiled) -> None:
    """Let the scheduler turn until a profile that ended by itself is written."""
    deadline = time.monotonic() + 60
    while profiled.engine.scheduler._profiler.is_busy:
        assert time.monotonic() < deadline
        profiled.engine.scheduler.step()
        time.sleep(0.01)


def test_a_number_of_steps_ends_it(profiled: Profiled) -> None:
    sizes = []
    for steps in (1, 8):
        name = f"steps-{steps}"
        profiled.ask(is_start=True, name=name, num_steps=steps)
        profiled.engine.generate([4, 5, 6], max_new_tokens=20)
        wait_written(profiled)
        assert "no profile runs" in (profiled.ask(is_start=False).error or "")
        sizes.append(num_operators(profiled.trace(name)))
    assert 0 < sizes[0] < sizes[1]


def test_its_time_is_bounded_without_a_forward(
    profiled: Profiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = profiled.ask(is_start=True, name="idle")
    profiler = profiled.engine.scheduler._profiler
    monkeypatch.setattr(
        profiler, "_clock", lambda: time.monotonic() + MAX_SECONDS + 0.1
    )
    wait_written(profiled)
    assert Path(started.path).stat().st_size > 0


def test_the_engine_goes_on_while_a_trace_is_written(
    profiled: Profiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests and questions are answered; the end of the writing is told after."""
    go = profiled.folder / "go"
    write = profiler._write

    def write_late(profile: Any, path: Path) -> None:
        while not go.exists():
            time.sleep(0.01)
        write(profile, path)

    monkeypatch.setattr(profiler, "_write", write_late)
    engine = profiled.engine
    profiled.ask(is_start=True, name="slow", num_steps=2)
    assert len(engine.generate([1, 2], max_new_tokens=9).output_ids) == 9
    engine.io.requests.append(ProfileReq(call_id=7, is_start=False))
    assert "being written" in (profiled.ask(is_start=True, name="next").error or "")
    engine.io.requests.append(GetStateReq(call_id=3))
    engine.scheduler.step()
    (state,) = engine.io.responses
    assert isinstance(state, GetStateRsp)
    engine.io.responses.clear()
    assert len(engine.generate([3], max_new_tokens=9).output_ids) == 9
    go.touch()
    assert profiled.await_answer().error is None
    assert num_operators(profiled.trace("slow")) > 0


def test_a_trace_that_cannot_be_written_is_told(
    profiled: Profiled,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def full(profile: Any, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiler, "_write", full)
    profiled.ask(is_start=True, name="full")
    assert "could not be written" in (profiled.ask(is_start=False).error or "")
    assert "No space left" in capfd.readouterr().err


def test_what_cannot_be_written_is_refused_at_once(profiled: Profiled) -> None:
    (profiled.folder / "file").write_text("")
    for options in (
        {"folder": str(profiled.folder / "file"), "name": "a"},
        {"name": "n" * 300},
    ):
        assert profiled.ask(is_start=True, **options).error
    assert (
        "add CPU"
        in (profiled.ask(is_start=True, name="gpu", activities=["GPU"]).error or "")
        or profiled.engine.server_args.device == "cuda"
    )
    # Nothing of an earlier profile is overwritten.
    profiled.ask(is_start=True, name="twice", num_steps=1)
    profiled.ask(is_start=False)
    assert "exists" in (profiled.ask(is_start=True, name="twice").error or "")
    assert profiled.engine.generate([1], max_new_tokens=2).output_ids


def test_a_shutdown_writes_what_runs(profiled: Profiled) -> None:
    profiled.ask(is_start=True, name="last")
    profiled.engine.io.requests.append(ShutdownReq())
    profiled.engine.scheduler.run_event_loop()
    assert profiled.trace("last") is not None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
