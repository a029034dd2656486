"""The HTTP application of a `Wire`, asked in process."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from manager_world import Wire

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.managers.messages.io_struct import (
    GetStateReq,
    GetStateRsp,
    ProfileReq,
    ProfileRsp,
    SchedulerStats,
)


class App:
    """Answers requests; the scheduler's answers are `stats` and those of `profile`.

    Attributes:
        wire: the manager; `wire.sent` has what reached the scheduler.
        profile: the answer to the next profile messages, but for its id.
    """

    def __init__(self, **options: Any) -> None:
        self.wire = Wire(**options)
        self.stats = SchedulerStats()
        self.profile: dict[str, Any] = {"path": "trace"}
        manager = self.wire.manager
        args = manager.server_args
        self.app = create_app(Front(server_args=args, manager=manager, model_name="m"))

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(asyncio.wait_for(self._ask(method, path, options), 20))

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.ask("POST", path, json=body)

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a request that must be refused."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        return error

    async def _ask(
        self, method: str, path: str, options: dict[str, Any]
    ) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        answering = asyncio.create_task(self._answer(len(self.wire.sent)))
        try:
            async with httpx.AsyncClient(
                transport=transport, base_url="http://x"
            ) as http:
                return await http.request(method, path, **options)
        finally:
            answering.cancel()

    async def _answer(self, seen: int) -> None:
        """Play the scheduler for all messages after the first `seen`."""
        while True:
            for message in self.wire.sent[seen:]:
                seen += 1
                if isinstance(message, GetStateReq):
                    answer = GetStateRsp(call_id=message.call_id, stats=self.stats)
                    self.wire.manager.receive(answer)
                elif isinstance(message, ProfileReq):
                    reply = ProfileRsp(call_id=message.call_id, **self.profile)
                    self.wire.manager.receive(reply)
            await asyncio.sleep(0.001)
