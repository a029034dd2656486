"""A plain HTTP/1.1 client that may send wrong bytes and leave at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

CHUNK = 4096
MAX_HEAD = 1 << 20


class Closed(Exception):
    """The server closed the connection before an answer was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete answer. `headers` have names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(
    method: str, path: str, body: bytes = b"", *, is_chunked: bool = False
) -> tuple[bytes, bytes]:
    """The head and the body of a request, as they are sent."""
    length = "Transfer-Encoding: chunked"
    if not is_chunked:
        length = f"Content-Length: {len(body)}"
    head = f"{method} {path} HTTP/1.1\r\nHost: fuzz\r\n{length}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    if is_chunked:
        pieces = [body[i : i + CHUNK] for i in range(0, len(body), CHUNK)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    return head.encode(), body


class Connection:
    """One connection; opened anew where it was closed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, data: bytes) -> None:
        """Send `data`; opens the connection if there is none.

        Raises:
            Closed: the server has closed it.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                self._host, self._port, limit=MAX_HEAD
            )
        try:
            self._streams[1].write(data)
            await self._streams[1].drain()
        except ConnectionError as error:
            raise Closed from error

    async def receive(self) -> Answer:
        """Read a whole answer.

        Raises:
            Closed: it ends too early.
        """
        status, headers = await self.receive_head()
        pieces = [piece async for piece in self.pieces(headers)]
        if headers.get("connection") == "close":
            self.close()
        return Answer(status=status, headers=headers, body=b"".join(pieces))

    async def receive_head(self) -> tuple[int, dict[str, str]]:
        """Read the status and the headers of an answer, after interim ones."""
        reader = self._reader()
        head = b"HTTP/1.1 1"
        try:
            while head.split(b" ", 2)[1].startswith(b"1"):
                head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.close()
            raise Closed from error
        lines = head.decode("latin-1").split("\r\n")
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(lines[0].split()[1]), headers

    async def pieces(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The body that belongs to `headers`, as it comes."""
        reader = self._reader()
        try:
            if headers.get("transfer-encoding") != "chunked":
                length = int(headers.get("content-length", "0"))
                yield await reader.readexactly(length)
                return
            while size := int(await reader.readuntil(b"\r\n"), 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.close()
            raise Closed from error

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Send a request and read its answer; once more on a new connection where the
        server had closed the old one."""
        data = b"".join(request_bytes(method, path, body))
        is_new = self._streams is None
        try:
            await self.send(data)
            return await self.receive()
        except Closed:
            if is_new:
                raise
            self.close()
        await self.send(data)
        return await self.receive()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    def _reader(self) -> asyncio.StreamReader:
        if self._streams is None:
            raise Closed
        return self._streams[0]
