"""Who asks for health shares one question, which takes nobody's place."""

from __future__ import annotations

import asyncio

import pytest
from manager_world import Wire, prompt, run

from sglang.srt.managers.front.health_probe import Health, HealthProbe
from sglang.srt.managers.messages.errors import Unavailable
from sglang.srt.managers.messages.io_struct import (
    GetStateReq,
    GetStateRsp,
    SchedulerStats,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def questions(wire: Wire) -> list[GetStateReq]:
    return [message for message in wire.sent if isinstance(message, GetStateReq)]


def answer_state(wire: Wire, *, is_degraded: bool) -> None:
    (question,) = questions(wire)
    stats = SchedulerStats(kv_canary_is_degraded=is_degraded)
    wire.manager.receive(GetStateRsp(call_id=question.call_id, stats=stats))


def test_an_idle_engine_makes_one_token_for_all_who_ask() -> None:
    async def work() -> None:
        wire = Wire()
        probe = HealthProbe(wire.manager)
        asking = [asyncio.create_task(probe.check()) for _ in range(50)]
        await settle()
        (sent,) = wire.generated()
        assert sent.sampling_params.max_new_tokens == 1
        asking[0].cancel()
        wire.answer(sent.rid, [1])
        await settle()
        answer_state(wire, is_degraded=True)
        first, *found = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError)
        for health in (*found, await probe.check()):
            assert isinstance(health, Health) and health.age < 1
            assert health.is_degraded
        assert len(wire.generated()) == 1

    run(work())


def test_a_busy_engine_is_asked_between_two_steps() -> None:
    """In a full queue, too."""

    async def work() -> None:
        wire = Wire(max_queued_requests=1, max_running_requests=1)
        probe = HealthProbe(wire.manager)
        for rid in ("a", "b"):
            await wire.manager.submit([prompt(rid=rid)])
        asking = [asyncio.create_task(probe.check()) for _ in range(50)]
        await settle()
        assert [sent.rid for sent in wire.generated()] == ["a", "b"]
        answer_state(wire, is_degraded=False)
        for health in await asyncio.gather(*asking):
            assert health.age < 1 and not health.is_degraded

    run(work())


@pytest.mark.parametrize("is_busy", [False, True])
def test_no_answer_is_a_503_for_all_and_the_next_asks_again(
    is_busy: bool,
) -> None:
    async def work() -> None:
        wire = Wire(health_timeout=0.05)
        probe = HealthProbe(wire.manager)
        if is_busy:
            await wire.manager.submit([prompt(rid="a")])
        for count in (1, 2):
            asking = [asyncio.create_task(probe.check()) for _ in range(5)]
            for answer in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(answer, Unavailable)
            asked = questions(wire) if is_busy else wire.generated()
            assert len(asked) == count
            if not is_busy:
                # A token that nobody waits for any more does not make the engine busy.
                assert wire.aborted() == [sent.rid for sent in wire.generated()]
                wire.answer(asked[-1].rid, [])

    run(work())
