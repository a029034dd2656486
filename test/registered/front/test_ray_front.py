"""A replica under Ray Serve, and the front that hands it requests, without Ray."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from sglang.srt.ray import front as front_module
from sglang.srt.ray.front import (
    ATTEMPTS,
    create_front,
    prefix_key,
)
from sglang.srt.ray.http_call import HttpCall, answer_messages
from sglang.srt.ray.replica import EngineReplica, ReplicaFailed
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.ray_fleet import ECHO, Fleet, Lost, ask_front

register_cpu_ci(est_time=5, suite="cpu")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "FIRST_WAIT_SECONDS", 0.0)


PATHS = st.sampled_from(["prompt", "text", "messages", "input_ids", "input"])


@given(
    field=PATHS,
    prefix=st.text(min_size=40, max_size=60),
    ends=st.lists(st.text(max_size=20), min_size=2, max_size=2),
    other=st.dictionaries(st.sampled_from(["model", "stream", "n"]), st.integers()),
)
def test_prompts_that_begin_alike_have_one_key(
    field: str, prefix: str, ends: list[str], other: dict[str, int]
) -> None:
    def body(end: str, fields: dict[str, int]) -> bytes:
        value: Any = [{"role": "user", "content": prefix + end}]
        value = value if field == "messages" else prefix + end
        return json.dumps({**fields, field: value}).encode()

    keys = {
        prefix_key(body(ends[0], other), prefix_bytes=40),
        prefix_key(body(ends[1], {}), prefix_bytes=40),
    }
    assert len(keys) == 1 and keys != {""}
    changed = body("", {}).replace(b'"' + field.encode(), b'"x', 1)
    assert prefix_key(changed, prefix_bytes=40) == ""


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'"x"'])
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert prefix_key(body, prefix_bytes=10) == ""


def test_prompts_that_begin_otherwise_have_other_keys() -> None:
    bodies = [json.dumps({"prompt": f"{i} of many"}).encode() for i in range(100)]
    assert len({prefix_key(body, prefix_bytes=64) for body in bodies}) == 100


def test_the_front_hands_over_requests_and_answers() -> None:
    fleet = Fleet(ECHO)
    body = b'{"prompt": "p"}'
    answer = asyncio.run(ask_front(fleet, body))
    assert answer.content == b"/v1/chat" + body
    assert answer.headers["x-given"] == "y"
    assert fleet.asked == [(prefix_key(body, prefix_bytes=64), body)]


@pytest.mark.parametrize(
    ("routing", "key"),
    [
        ("load", ""),
        ("session", "s"),
        ("prefix", prefix_key(b'{"prompt": "p"}', prefix_bytes=64)),
    ],
)
def test_the_routing_makes_the_key(routing: str, key: str) -> None:
    fleet = Fleet(ECHO)
    asyncio.run(ask_front(fleet, b'{"prompt": "p"}', routing=routing))
    assert [given for given, _ in fleet.asked] == [key]


@pytest.mark.parametrize("losses", [1, ATTEMPTS - 1])
def test_a_replica_that_is_lost_before_it_answers_is_not_noticed(losses: int) -> None:
    fleet = Fleet(ECHO, losses=losses)
    answer = asyncio.run(ask_front(fleet, b"{}"))
    assert answer.status_code == 200 and answer.content == b"/v1/chat{}"
    assert len(fleet.asked) == losses + 1


def test_replicas_that_are_all_lost_are_a_503() -> None:
    answer = asyncio.run(ask_front(Fleet(ECHO, losses=ATTEMPTS), b"{}"))
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    fleet = Fleet(ECHO, losses=1, after=2)
    with pytest.raises(Lost):
        asyncio.run(ask_front(fleet, b"{}"))
    assert len(fleet.asked) == 1


@pytest.mark.parametrize("is_early", [True, False])
def test_only_a_client_that_leaves_early_cancels_its_request(is_early: bool) -> None:
    pieces = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if is_early:
            await pieces.wait()
        await send({"type": "http.response.body", "body": b"all"})
        # The rest of an application's life, after its client has all.
        await asyncio.sleep(0.05)

    fleet = Fleet(slow)
    front = create_front(
        fleet, key_of=lambda call: "", max_body_bytes=9, max_total_body_bytes=9
    )
    leaves, sent = asyncio.Event(), []
    body = {"type": "http.request", "body": b"{}", "more_body": False}
    messages = [body]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if is_early or message["type"] == "http.response.body":
            leaves.set()

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(front(scope, receive, send))
    assert fleet.answers[0].is_cancelled is is_early
    assert len(sent) == (1 if is_early else 2)


def test_a_body_that_is_too_large_reaches_no_replica() -> None:
    fleet = Fleet(ECHO)
    answer = asyncio.run(ask_front(fleet, b"x" * 1001))
    assert answer.status_code == 413 and not fleet.asked


def test_a_client_that_leaves_ends_the_application() -> None:
    ended = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "more_body": True})
        finally:
            ended.set()

    async def leave() -> None:
        messages = answer_messages(endless, HttpCall(scope={"type": "http"}, body=b""))
        assert (await anext(messages))["status"] == 200
        await messages.aclose()
        assert ended.is_set()

    asyncio.run(leave())


def test_a_replica_serves_until_its_scheduler_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = asyncio.Event()
    monkeypatch.setattr(EngineReplica, "_leave", lambda self: left.set())
    scope = {
        **{"type": "http", "method": "POST", "path": "/generate", "headers": []},
        **{"query_string": b"", "http_version": "1.1", "scheme": "http"},
    }
    body = {"text": "def ", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    call = HttpCall(scope=scope, body=json.dumps(body).encode())

    async def live() -> None:
        replica = EngineReplica.__new__(EngineReplica)
        await replica.__init__({"max_total_tokens": 256})  # type: ignore[misc]
        await replica.check_health()
        begin, *_ = [message async for message in replica.answer(call)]
        assert begin["status"] == 200
        replica._core.process.kill()
        await asyncio.wait_for(replica._core.died.wait(), 60)
        with pytest.raises(ReplicaFailed, match="the scheduler is dead"):
            await replica.check_health()
        # Nothing of an answer is sent: another replica may give it.
        with pytest.raises(ReplicaFailed, match="the engine has died"):
            await anext(replica.answer(call))
        await asyncio.wait_for(left.wait(), 60)
        await replica.close()

    asyncio.run(live())


def test_a_replica_that_cannot_start_says_why_in_a_line() -> None:
    async def start() -> None:
        replica = EngineReplica.__new__(EngineReplica)
        await replica.__init__({"model_path": "/none"})  # type: ignore[misc]

    with pytest.raises(ReplicaFailed) as error:
        asyncio.run(start())
    assert str(error.value).startswith("the replica did not start: --model-path /none")
    assert "\n" not in str(error.value)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
