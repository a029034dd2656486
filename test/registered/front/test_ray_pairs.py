"""A front that pairs prefill and decode replicas, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from sglang.srt.ray import front as front_module
from sglang.srt.ray import pairs
from sglang.srt.ray.front import create_front
from sglang.srt.ray.pairs import ADDRESS, PairedReplicas
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.ray_fleet import ECHO, Fleet, Prefills, ask_front

register_cpu_ci(est_time=2, suite="cpu")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "FIRST_WAIT_SECONDS", 0.0)


def ask_pair(
    body: dict[str, Any] | bytes,
    *,
    path: str = "/generate",
    prefill: Prefills | None = None,
    decode: Fleet | None = None,
) -> tuple[httpx.Response, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the answer, and the bodies that prefill and decode replicas got."""
    prefill, decode = prefill or Prefills(ECHO), decode or Fleet(ECHO)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = asyncio.run(ask_front(PairedReplicas(prefill, decode), content, path))
    given = [
        [json.loads(body or b"0") for _, body in of.asked] for of in (prefill, decode)
    ]
    return answer, given[0], given[1]


@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}, 0),
        ("/generate", {"text": ["a", "b"]}, 2),
        ("/generate", {"input_ids": [1, 2]}, 0),
        ("/generate", {"input_ids": [[1, 2], [3], [4]], "stream": True}, 3),
        ("/v1/completions", {"prompt": [" a"]}, 1),
        ("/v1/completions", {"prompt": [5, 6], "bootstrap_host": "evil"}, 0),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 0),
    ],
)
def test_both_replicas_get_the_request_with_one_room_for_each_prompt(
    path: str, fields: dict[str, Any], count: int
) -> None:
    answer, (prefill,), (decode,) = ask_pair(fields, path=path)
    assert answer.status_code == 200
    assert json.loads(answer.content.removeprefix(path.encode())) == decode
    room = prefill.pop("bootstrap_room")
    assert decode.pop("bootstrap_room") == room
    rooms = room if count else [room]
    assert len(set(rooms)) == max(count, 1) and all(0 <= one < 1 << 63 for one in rooms)
    assert (decode.pop("bootstrap_host"), decode.pop("bootstrap_port")) == ("h", 7)
    assert prefill == decode == {k: v for k, v in fields.items() if k not in ADDRESS}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", b""),
        ("/generate", b"[1]"),
        ("/generate", b"{"),
        ("/v1/embeddings", {"input": "a"}),
        ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": 0}),
        ("/generate", {"text": ["a"] * 4}),
    ],
)
def test_what_needs_no_pair_goes_to_one_replica_as_it_is(
    path: str, body: dict[str, Any] | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "MOST_PROMPTS", 3)
    prefill, decode = Prefills(ECHO), Fleet(ECHO)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    asyncio.run(ask_front(PairedReplicas(prefill, decode), content, path))
    assert not prefill.asked and [given for _, given in decode.asked] == [content]


@pytest.mark.parametrize("path", ["/generate", "/v1/embeddings"])
def test_a_client_cannot_say_whose_kv_is_taken(path: str) -> None:
    address = {"bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 2}
    body = {"text": "a", "logprob_start_len": 0, **address}
    _, prefill, (decode,) = ask_pair(body, path=path)
    assert not prefill and decode == {"text": "a", "logprob_start_len": 0}


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b"busy"})


async def wait_for_room(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request without a room."""
    given = await receive()
    if "bootstrap_room" in json.loads(given["body"]):
        await asyncio.Event().wait()
    messages = [given]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    await ECHO(scope, again, send)


def test_a_prefill_replica_that_is_lost_or_silent_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, (decode,) = ask_pair({"text": "a"}, prefill=Prefills(ECHO, losses=1))
    assert decode == {"text": "a"}
    # Lost later: the decode engine knows what has come, and need not be asked again.
    answer, _, decodes = ask_pair(
        {"text": "a"}, prefill=Prefills(ECHO, losses=1, after=1)
    )
    assert answer.status_code == 200 and len(decodes) == 1

    class Silent(Prefills):
        async def _with_meeting(self, messages: Any) -> AsyncIterator[Message]:
            await asyncio.Event().wait()
            yield {}

    monkeypatch.setattr(pairs, "MEETING_SECONDS", 0.01)
    silent = Silent(ECHO)
    _, _, (decode,) = ask_pair({"text": "a"}, prefill=silent)
    assert decode == {"text": "a"} and silent.answers[0].is_cancelled


def test_a_request_that_the_prefill_replica_refuses_is_asked_without_it() -> None:
    decode = Fleet(wait_for_room)
    answer, _, (first, second) = ask_pair(
        {"text": "a"}, prefill=Prefills(refuse), decode=decode
    )
    assert answer.status_code == 200 and "bootstrap_room" in first
    assert second == {"text": "a"}
    assert decode.answers[0].is_cancelled and not decode.answers[1].is_cancelled


def test_a_decode_replica_that_is_lost_is_replaced_with_a_new_room() -> None:
    answer, prefills, decodes = ask_pair({"text": "a"}, decode=Fleet(ECHO, losses=2))
    assert answer.status_code == 200
    rooms = [one["bootstrap_room"] for one in prefills]
    assert rooms == [one["bootstrap_room"] for one in decodes]
    assert len(set(rooms)) == 3


@pytest.mark.parametrize("has_met", [False, True])
def test_a_client_that_leaves_stops_both_replicas(has_met: bool) -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    class Unmet(Prefills):
        async def _with_meeting(self, messages: Any) -> AsyncIterator[Message]:
            await asyncio.Event().wait()
            yield {}

    prefill = Prefills(endless) if has_met else Unmet(endless)
    decode = Fleet(endless)

    async def leave() -> None:
        front = create_front(
            PairedReplicas(prefill, decode),
            key_of=lambda call: "",
            max_body_bytes=99,
            max_total_body_bytes=99,
        )
        messages = [{"type": "http.request", "body": b'{"text": "a"}'}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            while not (decode.answers if has_met else prefill.answers):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
        await asyncio.wait_for(front(scope, receive, send), 20)

    asyncio.run(leave())
    assert prefill.answers[0].is_cancelled
    assert [one.is_cancelled for one in decode.answers] == [True] * has_met


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
