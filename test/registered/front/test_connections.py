"""Clients that are slow, silent, many or gone: each costs only itself."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from contextlib import suppress

import h11
import pytest
from manager_world import Wire, run
from starlette.types import Receive, Scope, Send
from web_world import (
    GET_HEALTH,
    LEAVE,
    PATIENCE,
    Peer,
    Web,
    app_of,
    eventually,
    post,
    serving,
)

from sglang.srt.entrypoints.acceptor import SPARE_PLACES
from sglang.srt.entrypoints.http_parser import StrictParser
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=16, suite="cpu")

MAX_HEADER_BYTES = 16384
MODELS = GET_HEALTH.replace(b"/health", b"/v1/models")[:-2] + LEAVE + b"\r\n"

SHORT = {"header_timeout": 0.3, "body_timeout": 0.3, "write_timeout": 0.3}
GENERATE = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}, "rid": "a"}
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"


async def drip(peer: Peer, part: bytes, *, seconds: float) -> None:
    """Send `part` again and again, as slowly."""
    with suppress(ConnectionError):
        while True:
            peer.send(part)
            await peer.writer.drain()
            await asyncio.sleep(seconds)


# -- deadlines -------------------------------------------------------------------------


# A slow client: its first bytes, those it goes on to send, and the answer, if any.
SLOW: dict[str, tuple[bytes, bytes, bytes]] = {
    "silent": (b"", b"", b""),
    "half a head": (GET_HEALTH[:-2], b"", b"408"),
    "a head in drops": (GET_HEALTH[:-2], b"A: b\r\n", b"408"),
    "no body": (HEAD + b"\r\n", b"", b"408"),
    "a body in drops": (HEAD + b"\r\n{", b" ", b"408"),
    "no body after 100": (HEAD + b"Expect: 100-continue\r\n\r\n", b"", b"408"),
    "a second request": (GET_HEALTH + HEAD + b"\r\n", b"", b"408"),
}


def test_a_client_that_owes_something_is_dropped() -> None:
    async def work() -> None:
        wire = Wire()

        async def be_slow(web: Web, name: str) -> None:
            start, then, status = SLOW[name]
            peer = await web.open()
            peer.send(start)
            began = time.monotonic()
            dripping = asyncio.create_task(drip(peer, then, seconds=0.02))
            answer = await peer.rest()
            dripping.cancel()
            assert time.monotonic() - began > 0.25, name
            assert status in answer and bool(status) == bool(answer), name

        async with serving(app_of(wire), **SHORT) as web:
            slow = asyncio.gather(*(be_slow(web, name) for name in SLOW))
            assert await web.is_healthy()
            await slow
            assert await web.is_healthy()
            assert not wire.generated()

    run(work())


def test_who_keeps_the_rate_may_take_long() -> None:
    """More than twice the deadline; a pause in the middle of a body is not the client's
    where the server itself does not read."""

    async def work() -> None:
        seen = 0

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal seen
            await asyncio.sleep(1.0)
            more = True
            while more:
                message = await receive()
                seen += len(message["body"])
                more = message["more_body"]
            await answer(send)

        async with serving(app, min_transfer_rate=1000.0, body_timeout=0.8) as web:
            peer = await web.open()
            peer.send(HEAD + b"\r\n" + bytes(82_000))
            for _ in range(18):
                await asyncio.sleep(0.1)
                peer.send(bytes(1000))
            assert b"200" in await peer.until(b"ok")
            assert seen == 100_000
            peer.close()

    run(work())


def test_a_resting_connection_ends() -> None:
    async def work() -> None:
        async with serving(app_of(Wire()), keep_alive_timeout=1, **SHORT) as web:
            peer = await web.open()
            for _ in range(2):
                peer.send(GET_HEALTH)
                assert b"200" in await peer.until(b"\r\n\r\n")
                await asyncio.sleep(0.6)  # longer than a head may take
            assert await peer.rest() == b""

    run(work())


def test_the_rest_of_a_refused_body_is_not_read_for_ever() -> None:
    async def work() -> None:
        wire = Wire(api_key="k")
        async with serving(app_of(wire), **SHORT) as web:
            peer = await web.open()
            peer.send(HEAD.replace(b"100000", b"99999999999") + b"\r\n")
            assert b"401" in await peer.until(b"}}")
            sending = asyncio.create_task(drip(peer, bytes(10_000), seconds=0.01))
            assert await peer.rest() == b""
            sending.cancel()

    run(work())


# -- clients that do not read ----------------------------------------------------------


async def answer(send: Send, *parts: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})


async def narrow_peer(web: Web) -> Peer:
    """A client whose host takes little before it reads."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.connect(("127.0.0.1", web.port))
    reader, writer = await asyncio.open_connection(sock=own, limit=1024)
    return Peer(reader, writer)


@pytest.mark.parametrize("is_endless", [False, True])
def test_a_client_that_does_not_read_is_dropped(is_endless: bool) -> None:
    """Also where its answer is complete and only the connection is left to end."""

    async def work() -> None:
        sent, ended = 0, asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal sent
            if scope["path"] == "/other":
                await answer(send)
                return
            gone = asyncio.create_task(until_gone(receive))
            if is_endless:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": []}
                )
                while not gone.done():
                    part = bytes(16384)
                    await send(
                        {"type": "http.response.body", "body": part, "more_body": True}
                    )
                    sent += len(part)
            else:
                await answer(send, bytes(16_000_000))
            await gone
            ended.set()

        async with serving(app, **SHORT) as web:
            peer = await narrow_peer(web)
            peer.send(GET_HEALTH)
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            other = web.ask(b"GET /other HTTP/1.1\r\nHost: x\r\n" + LEAVE + b"\r\n")
            assert b"ok" in await other
            await asyncio.wait_for(ended.wait(), PATIENCE)
            # About as much as the kernel takes.
            assert sent < 16_000_000
            peer.close()

    run(work())


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def test_a_slow_reader_gets_everything() -> None:
    async def work() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await answer(send, *[bytes(16384)] * 64)

        async with serving(app, min_transfer_rate=10_000.0, **SHORT) as web:
            peer = await narrow_peer(web)
            peer.send(GET_HEALTH[:-2] + LEAVE + b"\r\n")
            received = 0
            while part := await asyncio.wait_for(peer.reader.read(8192), PATIENCE):
                received += len(part)
                await asyncio.sleep(0.005)
            assert received > 64 * 16384

    run(work())


# -- too many --------------------------------------------------------------------------


async def finish(wire: Wire, stream: Peer) -> None:
    wire.answer("a", [5])
    assert b"[DONE]" in await stream.until(b"[DONE]\n\n")
    stream.close()


def test_beyond_the_limit_clients_wait_while_others_go_on(
    log: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire), max_connections=3) as web:
            stream = await web.open()
            stream.send(post("/generate", GENERATE | {"stream": True}))
            await eventually(lambda: len(wire.generated()) == 1)
            busy = [await web.open() for _ in range(2)]
            for i, peer in enumerate(busy):
                peer.send(post("/generate", GENERATE | {"rid": f"b{i}"}))
            await eventually(lambda: len(wire.generated()) == 3)
            waiting = [asyncio.create_task(web.ask(MODELS)) for _ in range(10)]
            for _ in range(2):
                wire.answer("a", [5], None)
                assert b"data: " in await stream.until(b"\n\n")
                await asyncio.sleep(0.2)
            # Probes are answered at once, and take nobody's place.
            for _ in range(2 * SPARE_PLACES):
                assert await web.is_healthy()
            assert not any(task.done() for task in waiting)
            wire.answer("b0", [5])
            busy[0].close()
            answers = await asyncio.gather(*waiting)
            assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
            wire.answer("b1", [5])
            await finish(wire, stream)

    run(work())
    assert len([r for r in log.records if "--max-connections" in r.message]) == 1


def test_far_too_many_are_refused_and_probes_get_through(
    log: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire), max_connections=2) as web:
            busy = [await web.open() for _ in range(2)]
            for i, peer in enumerate(busy):
                peer.send(post("/generate", GENERATE | {"rid": f"b{i}"}))
            await eventually(lambda: len(wire.generated()) == 2)
            asking = [web.ask(MODELS) for _ in range(5 * SPARE_PLACES)]
            asked = asyncio.gather(*asking)
            assert await web.is_healthy()
            for i in range(2):
                wire.answer(f"b{i}", [5])
                assert b'"b' in await busy[i].until(b"}}")
                busy[i].close()
            for answer in await asked:
                is_refused = answer.startswith(b"HTTP/1.1 503")
                assert is_refused or answer.startswith(b"HTTP/1.1 200")
                assert is_refused == (b"retry-after: 1" in answer)
            assert await web.is_healthy()

    run(work())
    assert {r.levelname for r in log.records} == {"WARNING"}


@pytest.mark.parametrize("part", [b"", GET_HEALTH[:-2], b"G"])
def test_half_heads_make_room(part: bytes) -> None:
    """Long before --header-timeout, and many more than there are places."""

    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire), max_connections=4, header_timeout=60) as web:
            stream = await web.open()
            stream.send(post("/generate", GENERATE | {"stream": True}))
            await eventually(lambda: len(wire.generated()) == 1)
            slow = [await web.open() for _ in range(4 + 2 * SPARE_PLACES)]
            for peer in slow:
                peer.send(part)
            assert await web.is_healthy()
            assert b" 200 " in await web.ask(MODELS)
            answer = await slow[0].rest()
            assert answer.startswith(b"HTTP/1.1 408" if part else b"")
            # Who has sent its whole request is nobody who owes something.
            wire.answer("a", [5], None)
            assert b"data: " in await stream.until(b"\n\n")
            await finish(wire, stream)
            for peer in slow:
                peer.close()

    run(work())


def test_resting_connections_make_room() -> None:
    async def work() -> None:
        async with serving(app_of(Wire()), max_connections=4) as web:
            resting = [await web.open() for _ in range(4)]
            resting[0].send(GET_HEALTH)
            assert b"200" in await resting[0].until(b"\r\n\r\n")
            assert await web.is_healthy()
            for peer in resting:
                peer.close()

    run(work())


def test_out_of_descriptors_accepting_pauses_quietly(
    log: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire)) as web:
            stream = await web.open()
            stream.send(post("/generate", GENERATE | {"stream": True}))
            await eventually(lambda: len(wire.generated()) == 1)
            late = [socket.socket() for _ in range(5)]
            highest = max(map(int, os.listdir("/proc/self/fd")))
            taken = [
                os.dup(0) for _ in range(highest - len(os.listdir("/proc/self/fd")) + 2)
            ]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
            try:
                for one in late:
                    one.connect(("127.0.0.1", web.port))
                    one.sendall(GET_HEALTH)
                for _ in range(5):
                    wire.answer("a", [5], None)
                    assert b"data: " in await stream.until(b"\n\n")
                    await asyncio.sleep(0.1)
                # The loop rests, too: nothing turns while it waits.
                began = time.process_time()
                await asyncio.sleep(0.5)
                assert time.process_time() - began < 0.4
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for descriptor in taken:
                    os.close(descriptor)
            for one in late:
                one.setblocking(False)
                received = await asyncio.wait_for(
                    asyncio.get_running_loop().sock_recv(one, 4096), PATIENCE
                )
                assert b"200" in received
                one.close()
            await finish(wire, stream)

    run(work())
    assert len(log.records) == 1 and "new ones wait" in log.records[0].message


# -- clients that leave, or only end their side ----------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_its_answer(
    version: str, stream: bool
) -> None:
    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire)) as web:
            peer = await web.open()
            content = GENERATE | {"stream": stream}
            peer.send(post("/generate", content, version=version))
            peer.writer.write_eof()
            await eventually(lambda: len(wire.generated()) == 1)
            await asyncio.sleep(0.2)
            assert wire.aborted() == []
            wire.answer("a", [5, 6])
            answer = await peer.rest()
            assert b"200 OK" in answer and b"[5,6]" in answer
            has_interim = answer.startswith(b"HTTP/1.1 100")
            assert has_interim == (version == "1.1")
            assert await web.is_healthy()

    run(work())


def test_all_requests_before_the_end_are_answered() -> None:
    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire)) as web:
            peer = await web.open()
            peer.send(post("/generate", GENERATE) + GET_HEALTH * 2)
            peer.writer.write_eof()
            await eventually(lambda: len(wire.generated()) == 1)
            wire.answer("a", [5])
            answer = await peer.rest()
            assert answer.count(b"200 OK") == 3

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_of_a_client_that_has_gone_is_aborted(stream: bool) -> None:
    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire)) as web:
            peer = await web.open()
            peer.send(post("/generate", GENERATE | {"stream": stream}))
            await eventually(lambda: len(wire.generated()) == 1)
            peer.close()
            await eventually(lambda: wire.aborted() == ["a"])

    run(work())


# -- what a request may look like ------------------------------------------------------

FRAMING: dict[str, tuple[bytes, bytes]] = {
    "two framings": (b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"400"),
    "two lengths": (b"Content-Length: 2\r\nContent-Length: 3\r\n", b"400"),
    "a list of lengths": (b"Content-Length: 2, 3\r\n", b"400"),
    "negative": (b"Content-Length: -1\r\n", b"400"),
    "no number": (b"Content-Length: two\r\n", b"400"),
    "a sign": (b"Content-Length: +2\r\n", b"400"),
    "other digits": ("Content-Length: \N{SUPERSCRIPT TWO}\r\n".encode(), b"400"),
    "endless": (b"Content-Length: " + b"9" * 5000 + b"\r\n", b"400"),
    "unknown encoding": (b"Transfer-Encoding: gzip\r\n", b"501"),
    "two encodings": (b"Transfer-Encoding: gzip, chunked\r\n", b"501"),
    "a list of equal lengths": (b"Content-Length: 2, 2\r\n", b"400"),
    "equal lengths": (b"Content-Length: 2\r\nContent-Length: 2\r\n", b"400"),
    "no length": (b"Content-Length:\r\n", b"400"),
    "hexadecimal": (b"Content-Length: 0x2\r\n", b"400"),
    "another encoding first": (b"Transfer-Encoding: identity, chunked\r\n", b"501"),
    "another encoding last": (b"Transfer-Encoding: chunked, identity\r\n", b"501"),
    "nearly chunked": (b"Transfer-Encoding: xchunked\r\n", b"501"),
    "quoted": (b'Transfer-Encoding: "chunked"\r\n', b"501"),
    "repeated": (b"Transfer-Encoding: chunked\r\n" * 2, b"501"),
    "vertical tab": (b"Transfer-Encoding: \x0bchunked\r\n", b"400"),
    "a null": (b"Transfer-Encoding: chunked\x00\r\n", b"400"),
    "a fold": (b"A: b\r\n Content-Length: 2\r\n", b"400"),
    "a fold by a tab": (b"A: b\r\n\tContent-Length: 2\r\n", b"400"),
    "a folded length": (b"Content-Length:\r\n 2\r\n", b"400"),
    "a folded encoding": (b"Transfer-Encoding:\r\n chunked\r\n", b"400"),
    "a fold without text": (b"A: b\r\n \r\nContent-Length: 2\r\n", b"400"),
    "LF alone": (b"A: b\nContent-Length: 2\r\n", b"400"),
    "LF alone after a length": (b"Content-Length: 2\n", b"400"),
    "LF alone, twice": (b"Content-Length: 2\n\n", b"400"),
    "CR alone": (b"A: b\rContent-Length: 2\r\n", b"400"),
    "CR alone before CRLF": (b"Content-Length: 2\r\r\n", b"400"),
    "a control character": (b"A: \x01\r\nContent-Length: 2\r\n", b"400"),
    "delete": (b"A: \x7f\r\nContent-Length: 2\r\n", b"400"),
    "space before the colon": (b"Content-Length : 2\r\n", b"400"),
    "tab before the colon": (b"Transfer-Encoding\t: chunked\r\n", b"400"),
    "no colon": (b"Content-Length 2\r\n", b"400"),
    "no name": (b": 2\r\n", b"400"),
    "a long header": (b"A: " + bytes([97]) * 20_000 + b"\r\n", b"431"),
    "many headers": (b"A: b\r\n" * 3000, b"431"),
}


def test_ambiguous_requests_are_refused() -> None:
    """And what follows is not taken for a request."""

    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire)) as web:
            for name, (header, status) in FRAMING.items():
                head = b"POST /generate HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n"
                answer = await web.ask(head + b"{}" + post("/generate", GENERATE))
                assert answer.startswith(b"HTTP/1.1 " + status), (name, answer)
                assert answer.count(b"HTTP/1.1 ") == 1, name
                assert b'{"error":{' in answer, name
                assert b"connection: close" in answer.lower(), name
                assert await web.is_healthy(), name
            assert not wire.generated()

    run(work())


CHUNKS: dict[str, bytes] = {
    "0x": b"0x2\r\n{}\r\n0\r\n\r\n",
    "a sign": b"+2\r\n{}\r\n0\r\n\r\n",
    "a space before": b" 2\r\n{}\r\n0\r\n\r\n",
    "a space after": b"2 \r\n{}\r\n0\r\n\r\n",
    "an underscore": b"0_2\r\n{}\r\n0\r\n\r\n",
    "no size": b"\r\n{}\r\n0\r\n\r\n",
    "more than 64 bits": b"10000000000000002\r\n{}\r\n0\r\n\r\n",
    "LF alone": b"2\n{}\n0\n\n",
    "LF alone in an extension": b"2;a\nb\r\n{}\r\n0\r\n\r\n",
    "CR alone in an extension": b"2;a\rb\r\n{}\r\n0\r\n\r\n",
    "a null in an extension": b"2;\x00\r\n{}\r\n0\r\n\r\n",
    "LF alone after a chunk": b"2\r\n{}\n0\r\n\r\n",
    "more than the size": b"2\r\n{}}\r\n0\r\n\r\n",
    "LF alone in a trailer": b"2\r\n{}\r\n0\r\nA: b\n\r\n",
    "LF alone after the last": b"2\r\n{}\r\n0\r\n\n",
    "a folded trailer": b"2\r\n{}\r\n0\r\nA: b\r\n c\r\n\r\n",
}


CHUNKED = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_ambiguous_chunks_are_refused() -> None:
    # An extension and a trailer have no meaning, and are legal.
    good = b"2;name=value\r\n{}\r\n0\r\nA: b\r\n\r\n"

    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire)) as web:
            for name, body in (CHUNKS | {"good": good}).items():
                peer = await web.open()
                peer.send(CHUNKED + body)
                answer = await peer.until(b'"code":')
                peer.close()
                assert answer.startswith(b"HTTP/1.1 400"), (name, answer)
                is_refused = b"not valid HTTP" in answer
                assert is_refused == (name != "good"), (name, answer)
            assert await web.is_healthy()
            assert not wire.generated()

    run(work())


def test_requests_are_refused_in_whatever_pieces_they_come() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\n"
    requests = [CHUNKED + body for body in CHUNKS.values()]
    requests += [head + header + b"\r\n" for header, _ in FRAMING.values()]
    for request in requests:
        for size in (1, 7, len(request)):
            parser = StrictParser(MAX_HEADER_BYTES)
            with pytest.raises(h11.RemoteProtocolError):
                for at in range(0, len(request), size):
                    parser.receive_data(request[at : at + size])
                    while parser.next_event() is not h11.NEED_DATA:
                        pass
            assert parser.refusal is not None


def test_a_refusal_in_the_middle_of_a_body(log: pytest.LogCaptureFixture) -> None:
    """Also one that was answered before its end."""

    async def work() -> None:
        wire = Wire()
        async with serving(app_of(wire)) as web:
            head = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
            chunked = b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
            assert b" 400 " in await web.ask(head + chunked)
            keyed = Wire(api_key="k")
            async with serving(app_of(keyed)) as closed:
                peer = await closed.open()
                peer.send(head + chunked[:-4])
                assert b" 401 " in await peer.until(b"}}")
                peer.send(b"zz\r\n")
                assert await peer.rest() == b""
            assert await web.is_healthy()

    run(work())
    assert not log.records


def test_http_1_0(log: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serving(app_of(Wire())) as web:
            answer = await web.ask(b"GET /health HTTP/1.0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            chunked = b"POST /generate HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"
            assert b" 400 " in await web.ask(chunked + b"2\r\n{}\r\n0\r\n\r\n")

    run(work())
    assert not log.records


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
