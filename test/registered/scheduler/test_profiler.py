"""Profiles of a scheduler: what is written, and when they are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.managers.io_struct import ProfileReq, ProfileRsp, ShutdownReq
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
        (answer,) = (m for m in self.engine.io.responses if isinstance(m, ProfileRsp))
        self.engine.io.responses.clear()
        assert answer.call_id == 7
        return answer

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
    assert not (profiled.folder / "traces" / "second-TP-0.trace.json.gz").exists()
    assert "no profile runs" in (profiled.ask(is_start=False).error or "")


def test_a_number_of_steps_ends_it(profiled: Profiled) -> None:
    sizes = []
    for steps in (1, 8):
        name = f"steps-{steps}"
        profiled.ask(is_start=True, name=name, num_steps=steps)
        profiled.engine.generate([4, 5, 6], max_new_tokens=20)
        assert "no profile runs" in (profiled.ask(is_start=False).error or "")
        sizes.append(num_operators(profiled.trace(name)))
    assert 0 < sizes[0] < sizes[1]


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
