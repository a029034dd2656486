"""Pauses of generation: what becomes of requests, and that they go on as if nothing had
been."""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduler_world import engine, write_models

from sglang.srt.managers.messages.io_struct import (
    FlushCacheReq,
    FlushCacheRsp,
    GetStateReq,
    GetStateRsp,
    PauseReq,
    PauseRsp,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness

register_cpu_ci(est_time=6, suite="cpu")

KINDS = ["plain", "overlap", "spec", "spec overlap"]
PROMPTS = {"a": [1, 2, 3] * 20, "b": [4, 5], "c": [6] * 30}
OPTIONS = {"max_new_tokens": 40, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


def set_pause(harness: EngineHarness, *, is_on: bool, mode: str = "") -> None:
    """Pause or continue, and wait for the answer."""
    harness.io.requests.append(PauseReq(call_id=5, is_pause=is_on, mode=mode))
    harness.scheduler.step()
    answers = [m for m in harness.io.responses if isinstance(m, PauseRsp)]
    assert [answer.call_id for answer in answers] == [5]
    harness.io.responses = [m for m in harness.io.responses if m not in answers]


def flush(harness: EngineHarness) -> bool:
    harness.io.requests.append(FlushCacheReq(call_id=1))
    harness.scheduler.step()
    (answer,) = [m for m in harness.io.responses if isinstance(m, FlushCacheRsp)]
    harness.io.responses.remove(answer)
    return answer.success


def tokens_so_far(harness: EngineHarness) -> dict[str, list[int]]:
    return {
        rid: answer.output_ids for rid, answer in harness.collect(keep=True).items()
    }


def stay_paused(harness: EngineHarness) -> None:
    """Nothing is launched, however long; questions are answered."""
    scheduler = harness.scheduler
    before = tokens_so_far(harness)
    assert scheduler._wait_ms() > 0
    for _ in range(50):
        assert not scheduler.step()
    harness.io.requests.append(GetStateReq(call_id=9))
    scheduler.step()
    (state,) = [m for m in harness.io.responses if isinstance(m, GetStateRsp)]
    harness.io.responses.remove(state)
    assert tokens_so_far(harness) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_requests_go_on_as_if_nothing_had_been(
    models: Path, kind: str, mode: str
) -> None:
    """Paused within a prompt, in decodes, twice; whoever arrives meanwhile waits."""
    flags = {"chunked_prefill_size": 16}
    undisturbed = engine(models, kind, **flags)
    for rid, prompt in PROMPTS.items():
        undisturbed.submit(prompt, rid=rid, **OPTIONS)
    expected = undisturbed.run()
    for steps in (2, 9):
        harness = engine(models, kind, **flags)
        for rid in "ab":
            harness.submit(PROMPTS[rid], rid=rid, **OPTIONS)
        for _ in range(steps):
            harness.scheduler.step()
        for turn in range(2):
            set_pause(harness, is_on=True, mode=mode)
            if turn == 0:
                harness.submit(PROMPTS["c"], rid="c", **OPTIONS)
            stay_paused(harness)
            assert flush(harness) is (mode == "retract")
            set_pause(harness, is_on=False)
            for _ in range(4):
                harness.scheduler.step()
        found = harness.run()
        assert {rid: a.output_ids for rid, a in found.items()} == {
            rid: a.output_ids for rid, a in expected.items()
        }
        assert flush(harness)


@pytest.mark.parametrize("kind", KINDS)
def test_abort_ends_everybody_and_later_requests_wait(models: Path, kind: str) -> None:
    harness = engine(models, kind, chunked_prefill_size=16, max_running_requests=2)
    for rid, prompt in PROMPTS.items():
        harness.submit(prompt, rid=rid, **OPTIONS)
    for _ in range(6):
        harness.scheduler.step()
    set_pause(harness, is_on=True, mode="abort")
    ended = harness.collect()
    assert set(ended) == set(PROMPTS)
    for answer in ended.values():
        assert answer.finish_reason is not None
        assert answer.finish_reason.type == "abort"
        assert answer.finish_reason.message == "generation was paused"
    harness.submit([7, 8], rid="later", **OPTIONS)
    stay_paused(harness)
    assert flush(harness)
    set_pause(harness, is_on=False)
    (answer,) = harness.run().values()
    assert len(answer.output_ids) == 40


def test_an_abort_during_a_pause(models: Path) -> None:
    """Of one that waits at once; of one that holds memory when it goes on."""
    for mode, is_at_once in (("retract", True), ("in_place", False)):
        harness = engine(models, "plain")
        harness.submit([1, 2], rid="a", **OPTIONS)
        for _ in range(3):
            harness.scheduler.step()
        set_pause(harness, is_on=True, mode=mode)
        harness.abort("a")
        harness.scheduler.step()
        reason = harness.collect(keep=True)["a"].finish_reason
        assert (reason is not None) is is_at_once
        set_pause(harness, is_on=False)
        reason = harness.run()["a"].finish_reason
        assert reason is not None and reason.type == "abort"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
