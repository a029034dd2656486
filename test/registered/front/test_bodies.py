"""Memory for request bodies: bounded, shared in order, given back in time."""

from __future__ import annotations

import asyncio

import pytest
from manager_world import Wire, run
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from web_world import app_of, eventually, post, serving

from sglang.srt.entrypoints import body_budget
from sglang.srt.entrypoints.body_budget import FREE_BYTES, BodyBudget, release_body
from sglang.srt.entrypoints.middleware import BodyLimitMiddleware
from sglang.srt.managers.messages.errors import Unavailable
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

LARGE = FREE_BYTES + 1


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_SECONDS", 0.1)


def test_first_come_first_served() -> None:
    async def work() -> None:
        budget = BodyBudget(10)
        await budget.take(6)
        order: list[str] = []

        async def take(name: str, size: int) -> None:
            await budget.take(size)
            order.append(name)

        big = asyncio.create_task(take("big", 8))
        small = asyncio.create_task(take("small", 2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == []
        budget.give_back(6)
        await asyncio.gather(big, small)
        assert order == ["big", "small"]

    run(work())


def test_who_gives_up_holds_up_nobody(short_wait: None) -> None:
    async def work() -> None:
        budget = BodyBudget(10)
        await budget.take(6)
        big = asyncio.create_task(budget.take(8))
        gone = asyncio.create_task(budget.take(9))
        small = asyncio.create_task(budget.take(2))
        await asyncio.sleep(0.01)
        gone.cancel()
        with pytest.raises(Unavailable, match=r"take 6 of 10 .*--max-total-body-bytes"):
            await big
        await small
        budget.give_back(8)
        # Everything is there again.
        await budget.take(10)
        # Cancelled in the moment in which it was granted.
        late = asyncio.create_task(budget.take(10))
        await asyncio.sleep(0.01)
        budget.give_back(10)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        await budget.take(10)

    run(work())


class Upload:
    """A request whose body comes as the test says."""

    def __init__(self, app: ASGIApp, length: int | None) -> None:
        self.statuses: list[int] = []
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        headers = [] if length is None else [(b"content-length", b"%d" % length)]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    def send(self, part: bytes | None) -> None:
        self._parts.put_nowait(part)

    async def _receive(self) -> Message:
        part = await self._parts.get()
        more = part is not None
        return {"type": "http.request", "body": part or b"", "more_body": more}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])


async def reader(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, releases it, and holds its answer back for ever."""
    while (await receive())["more_body"]:
        pass
    release_body(scope)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await asyncio.Event().wait()


@pytest.mark.parametrize("is_announced", [True, False])
def test_bodies_beyond_the_budget_get_503(is_announced: bool, short_wait: None) -> None:
    async def work() -> None:
        app = BodyLimitMiddleware(reader, max_bytes=LARGE, budget=BodyBudget(2 * LARGE))
        length = LARGE if is_announced else None
        large = [Upload(app, length) for _ in range(3)]
        for upload in large:
            upload.send(bytes(LARGE))
        await eventually(lambda: len(large[2].statuses) == 1)
        assert [upload.statuses for upload in large] == [[], [], [503]]
        # Small ones pass, and a body that is parsed makes room while its answer lasts.
        small = Upload(app, FREE_BYTES)
        small.send(bytes(FREE_BYTES))
        large[0].send(None)
        small.send(None)
        await eventually(lambda: small.statuses == large[0].statuses == [200])
        again = Upload(app, length)
        again.send(bytes(LARGE))
        again.send(None)
        await eventually(lambda: again.statuses == [200])
        # So does one that ends without an answer.
        large[1].task.cancel()
        last = Upload(app, length)
        last.send(bytes(LARGE))
        last.send(None)
        await eventually(lambda: last.statuses == [200])

    run(work())


def test_a_body_that_only_announces_its_size_holds_nothing() -> None:
    async def work() -> None:
        app = BodyLimitMiddleware(reader, max_bytes=LARGE, budget=BodyBudget(LARGE))
        silent = [Upload(app, LARGE) for _ in range(10)]
        await asyncio.sleep(0)
        upload = Upload(app, LARGE)
        upload.send(bytes(LARGE))
        upload.send(None)
        await eventually(lambda: upload.statuses == [200])
        assert not any(one.statuses for one in silent)

    run(work())


def test_through_the_wire(short_wait: None) -> None:
    """The third of three large prompts at once is refused; its client may retry."""

    async def work() -> None:
        size = 200_000
        wire = Wire(max_body_bytes=size, max_total_body_bytes=2 * size)
        content = {"input_ids": [1], "rid": "a"}
        request = post("/generate", content, padding=size - 1000)
        async with serving(app_of(wire)) as web:
            held = [await web.open() for _ in range(2)]
            for peer in held:
                peer.send(request[:-10_000])
            await asyncio.sleep(0.2)
            third = await web.open()
            third.send(request)
            refused = await third.until(b"}}")
            assert b" 503 " in refused and b"retry-after: 1" in refused.lower()
            third.close()
            assert await web.is_healthy()
            held[0].close()
            last = await web.open()
            last.send(request)
            await eventually(lambda: len(wire.generated()) == 1)
            wire.answer("a", [5])
            assert b" 200 " in await last.until(b"}}")
            too_large = await web.ask(post("/generate", {"text": "x" * size}))
            assert b" 413 " in too_large and b"--max-body-bytes" in too_large
            for peer in (*held, last):
                peer.close()

    run(work())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
