"""A scheduler that stands still is noticed; one that is slow, idle or new is not."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from manager_world import Wire, prompt, run
from web_world import app_of, eventually

from sglang.srt.managers.front import heartbeat
from sglang.srt.managers.front.heartbeat import Heartbeat
from sglang.srt.managers.front.tokenizer_manager import ServerPhase
from sglang.srt.managers.messages.io_struct import (
    GetStateReq,
    GetStateRsp,
    SchedulerStats,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

TIMEOUT = 0.2


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.05)


def questions(wire: Wire) -> list[GetStateReq]:
    return [message for message in wire.sent if isinstance(message, GetStateReq)]


def reply(wire: Wire) -> None:
    last = questions(wire)[-1]
    wire.manager.receive(GetStateRsp(call_id=last.call_id, stats=SchedulerStats()))


async def statuses(wire: Wire) -> dict[str, int]:
    transport = httpx.ASGITransport(app=app_of(wire))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        paths = ("/health", "/readyz", "/livez")
        return {path: (await http.get(path)).status_code for path in paths}


def all_are(status: int) -> dict[str, int]:
    return {"/health": status, "/readyz": status, "/livez": status}


def test_a_scheduler_that_does_not_answer_is_noticed_and_forgiven() -> None:
    async def work() -> None:
        wire = Wire(health_timeout=TIMEOUT)
        assert await statuses(wire) == all_are(200)
        await asyncio.sleep(TIMEOUT / 2)
        assert await statuses(wire) == all_are(200)
        await asyncio.sleep(TIMEOUT)
        assert await statuses(wire) == all_are(503)
        # However many have asked, it will find one question.
        assert len(questions(wire)) == 1
        reply(wire)
        assert await statuses(wire) == all_are(200)

    run(work())


def test_whom_nobody_asks_owes_nothing() -> None:
    async def work() -> None:
        wire = Wire(health_timeout=TIMEOUT)
        assert await statuses(wire) == all_are(200)
        reply(wire)
        await asyncio.sleep(TIMEOUT * 2)
        assert await statuses(wire) == all_are(200)

    run(work())


def test_any_message_is_a_sign() -> None:
    async def work() -> None:
        wire = Wire(health_timeout=TIMEOUT)
        await wire.manager.submit([prompt(rid="a", stream=True)])
        await statuses(wire)
        for _ in range(5):
            await asyncio.sleep(TIMEOUT / 2)
            wire.answer("a", [1], None)
            assert await statuses(wire) == all_are(200)

    run(work())


@pytest.mark.parametrize(
    ("phase", "ready", "live"),
    [
        (ServerPhase.STARTING, 503, 200),
        (ServerPhase.READY, 200, 200),
        (ServerPhase.DRAINING, 503, 200),
        (ServerPhase.DEAD, 503, 503),
    ],
)
def test_liveness_and_readiness_by_phase(
    phase: ServerPhase, ready: int, live: int
) -> None:
    async def work() -> None:
        wire = Wire(health_timeout=TIMEOUT)
        wire.manager.phase = phase
        expected = {"/health": ready, "/readyz": ready, "/livez": live}
        assert await statuses(wire) == expected

    run(work())


def test_running_requests_ask_and_a_silence_is_logged_once(
    log: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        sent: list[None] = []
        beat = Heartbeat(lambda: sent.append(None), timeout=TIMEOUT)
        busy = False
        task = asyncio.create_task(beat.keep_asking(lambda: busy))
        await asyncio.sleep(0.2)
        assert not sent
        busy = True
        await eventually(lambda: not beat.is_alive)
        await asyncio.sleep(0.2)
        beat.on_sign()
        assert beat.is_alive and len(sent) == 1
        await eventually(lambda: len(sent) == 2)
        task.cancel()

    run(work())
    silent, again = [record.message for record in log.records]
    assert "--health-timeout" in silent and "answers again" in again


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
