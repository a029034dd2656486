"""A real web server inside the test's loop, and raw connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from manager_world import Wire
from starlette.types import ASGIApp

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.entrypoints.listener import listen
from sglang.srt.entrypoints.web_server import WebServer
from sglang.srt.server_args import ServerArgs

GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LEAVE = b"Connection: close\r\n"
# Long against what a step of a test takes on a busy machine.
PATIENCE = 15.0


def app_of(wire: Wire) -> ASGIApp:
    """The product's application with the scheduler that the test plays."""
    args = wire.manager.server_args
    return create_app(Front(server_args=args, manager=wire.manager, model_name="m"))


def post(
    path: str, content: Any, *headers: str, version: str = "1.1", padding: int = 0
) -> bytes:
    """A request with a JSON body, which `padding` makes longer."""
    body = json.dumps(content).encode() + b" " * padding
    lines = (
        f"POST {path} HTTP/{version}",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Web:
    """The address of a server, and what one may do with it."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> Peer:
        return Peer(*await asyncio.open_connection("127.0.0.1", self.port))

    async def ask(self, request: bytes) -> bytes:
        """The whole answer of a connection of its own, which the server closes."""
        peer = await self.open()
        peer.send(request)
        answer = await peer.rest()
        peer.close()
        return answer

    async def is_healthy(self) -> bool:
        answer = await self.ask(GET_HEALTH[:-2] + LEAVE + b"\r\n")
        return answer.startswith(b"HTTP/1.1 200")


class Peer:
    """A client's end of one connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), PATIENCE)

    async def rest(self) -> bytes:
        """Everything until the server closes; a reset ends it, too."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := await asyncio.wait_for(self.reader.read(65536), PATIENCE):
                received += part
        return received

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def serving(
    app: ASGIApp, *, max_connections: int = 1000, **flags: Any
) -> AsyncIterator[Web]:
    """`app` served by a real web server with `flags`."""
    args = ServerArgs(port=0, **flags)
    listener: socket.socket = listen(args)
    server = WebServer(app, args, max_connections=max_connections)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield Web(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await task


async def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
