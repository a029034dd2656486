"""Clients that ask for as much as the server accepts, and more; each coroutine is one
visit. Errors are also answers: only a server that stops answering is a failure."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

import httpx

Visit = Callable[["Visitor"], Awaitable[None]]

SECONDS = 20.0
CHAT = [{"role": "user", "content": "tell me everything"}]


class Visitor:
    """One client: its connection pool, its dice, the address of the server."""

    def __init__(self, url: str, seed: int) -> None:
        parts = urlsplit(url)
        self.address = parts.hostname or "127.0.0.1", parts.port or 80
        self.rng = random.Random(seed)
        self.http = httpx.AsyncClient(base_url=url, timeout=SECONDS)

    async def post(self, path: str, body: object) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        with suppress(httpx.TimeoutException):
            await self.http.post(path, content=content, headers=headers)

    async def stream(self, path: str, body: object, *, most: int) -> None:
        """Read events of a stream until `most` bytes have come, then leave."""
        seen = 0
        with suppress(httpx.TimeoutException):
            async with self.http.stream("POST", path, json=body) as response:
                async for chunk in response.aiter_bytes():
                    seen += len(chunk)
                    if seen > most:
                        return


async def logprob_streams(visitor: Visitor) -> None:
    body = {
        "messages": CHAT,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 400,
        "ignore_eos": True,
    }
    await visitor.stream("/v1/chat/completions", body, most=1 << 24)


async def cumulative_streams(visitor: Visitor) -> None:
    body = {
        "text": "x",
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 20,
        "sampling_params": {"max_new_tokens": 600, "ignore_eos": True},
    }
    await visitor.stream("/generate", body, most=1 << 26)


async def large_answers(visitor: Visitor) -> None:
    body = {
        "messages": CHAT,
        "logprobs": True,
        "top_logprobs": 20,
        "n": 8,
        "max_tokens": 200,
    }
    await visitor.post("/v1/chat/completions", body)


async def many_values(visitor: Visitor) -> None:
    entries = ",".join(f'"k{i}":1' for i in range(400_000))
    head = json.dumps({"messages": CHAT, "max_tokens": 1})[:-1]
    body = f'{head}, "chat_template_kwargs": {{{entries}}}}}'
    await visitor.post("/v1/chat/completions", body.encode())


async def large_texts(visitor: Visitor) -> None:
    text = "word " * visitor.rng.choice((10_000, 400_000, 6_000_000))
    await visitor.post("/generate", {"text": text})


async def large_keys(visitor: Visitor) -> None:
    key = str(visitor.rng.random()) + "k" * (8 << 20)
    params = {"max_new_tokens": 1}
    await visitor.post(
        "/generate", {"text": ["x"] * 50, "extra_key": key, "sampling_params": params}
    )


async def unknown_fields(visitor: Visitor) -> None:
    await visitor.post("/generate", {"u" * (8 << 20): 1})


async def slow_schemas(visitor: Visitor) -> None:
    """Send a new schema each time, without waiting for it."""
    parts = [{"pattern": f"^.{{{n}}}(a|b|{visitor.rng.random()})*$"} for n in range(40)]
    params = {"json_schema": json.dumps({"type": "string", "allOf": parts})}
    with suppress(httpx.TimeoutException):
        await visitor.http.post(
            "/generate", json={"text": "x", "sampling_params": params}, timeout=0.5
        )


async def half_sent_bodies(visitor: Visitor) -> None:
    reader, writer = await asyncio.open_connection(*visitor.address)
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    writer.write(head.encode() + b'{"text": "')
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(reader.read(1), 5.0)
    writer.close()


async def readers_that_stop(visitor: Visitor) -> None:
    _, writer = await asyncio.open_connection(*visitor.address)
    body = json.dumps(
        {
            "text": "x",
            "stream": True,
            "return_logprob": True,
            "top_logprobs_num": 20,
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        }
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await asyncio.sleep(5.0)
    writer.transport.abort()


async def probes(visitor: Visitor) -> None:
    for _ in range(50):
        await visitor.http.get(visitor.rng.choice(("/health_generate", "/v1/models")))


HOSTILE: dict[str, Visit] = {
    visit.__name__: visit
    for visit in (
        *(logprob_streams, cumulative_streams, large_answers, many_values),
        *(large_texts, large_keys, unknown_fields, slow_schemas),
        *(half_sent_bodies, readers_that_stop, probes),
    )
}


async def plain_request(visitor: Visitor) -> None:
    """Send an ordinary stream, like the other clients of the comparison."""
    body = {
        "messages": [{"role": "user", "content": f"say {visitor.rng.random()}"}],
        "stream": True,
        "max_tokens": 200,
        "ignore_eos": True,
    }
    await visitor.stream("/v1/chat/completions", body, most=1 << 30)
