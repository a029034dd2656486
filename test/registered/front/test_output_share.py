"""Streams with large events share a rate; whole answers are built aside and sent in
pieces."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
from manager_world import LENGTH, TOKENIZER, Wire, prompt, run

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.generate_api import GenerateAnswer
from sglang.srt.entrypoints.http_io import (
    PIECE_BYTES,
    EventStream,
    JsonResponse,
    event,
)
from sglang.srt.entrypoints.openai.logprobs import SLICE_TOKENS, chat_logprobs
from sglang.srt.entrypoints.output_share import SMALL_EVENT_BYTES, OutputShare
from sglang.srt.managers.front.side_work import LARGE
from sglang.srt.managers.messages.io_struct import LogprobDelta
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="cpu")

Message = MutableMapping[str, Any]


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


class Sent:
    """Everything that a response sends."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        self.bodies.append(message.get("body", b""))


def test_large_events_share_the_rate_and_small_ones_pay_nothing() -> None:
    share = OutputShare(bytes_per_second=1e6)

    async def pay(size: int, times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            await share.pay(size)
        return time.perf_counter() - begun

    async def work() -> None:
        large = [asyncio.create_task(pay(10_000, 5)) for _ in range(8)]
        await asyncio.sleep(0)
        # Would be 0.8 s alone.
        small = await pay(SMALL_EVENT_BYTES, 200)
        assert small < min(await asyncio.gather(*large))
        # 400 kB at 1 MB/s. Those that end first leave their share to the others.
        assert sum([await task for task in large]) / len(large) > 0.2

    run(work())


def test_an_event_waits_for_its_own_share_only() -> None:
    """A stream with events of 5 kB beside 20 with events of 5 MB."""
    share = OutputShare(bytes_per_second=1e8)

    async def work() -> None:
        huge = [asyncio.create_task(share.pay(5_000_000)) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.wait_for(share.pay(5_000), 0.5)
        assert not all(task.done() for task in huge)
        for task in huge:
            task.cancel()

    run(work())


def test_what_arrives_while_a_stream_waits_comes_in_one_event() -> None:
    async def work() -> None:
        wire = Wire()
        share = OutputShare(bytes_per_second=4 * SMALL_EVENT_BYTES)
        group = await wire.manager.submit(
            [prompt(params={"max_new_tokens": 20}, rid="r", stream=True)]
        )
        answer = GenerateAnswer(TOKENIZER, with_text=False)

        async def events() -> AsyncIterator[bytes]:
            async for (update,) in wire.manager.updates(group):
                padding = "x" * 2 * SMALL_EVENT_BYTES
                yield event({**answer.add(update), "padding": padding})

        sent = Sent()
        stream = EventStream(
            events(), group=group, release=wire.manager.release, share=share
        )
        sending = asyncio.create_task(stream({"type": "http"}, never, sent))
        for i in range(20):
            wire.answer("r", [100 + i], None if i < 19 else LENGTH)
            await asyncio.sleep(0.005)
        await sending
        shown = [body for body in sent.bodies if body.startswith(b"data: {")]
        assert 2 <= len(shown) <= 6
        last = json.loads(shown[-1].removeprefix(b"data: "))
        assert last["output_ids"] == [100 + i for i in range(20)]

    run(work())


@pytest.mark.parametrize("is_incremental", [False, True])
def test_incremental_answers_hold_what_is_new(is_incremental: bool) -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(rid="r", stream=True)])
        answer = GenerateAnswer(
            TOKENIZER, with_text=True, is_incremental=is_incremental
        )
        shown = []
        for i, token in enumerate((100, 101, 102)):
            delta = LogprobDelta(
                input_token=[(None, 7), (-1.0, 8)] if i == 0 else None,
                input_top=[None, [(-0.5, 9)]] if i == 0 else None,
                output_token=[(-float(i), token)],
                output_top=[[(-float(i), token)]],
            )
            finish = LENGTH if i == 2 else None
            wire.answer("r", [token], finish, logprobs=delta)
            shown.append(answer.add((await anext(group.updates()))[0]))
        ids = [a["output_ids"] for a in shown]
        tops = [len(a["meta_info"]["output_top_logprobs"]) for a in shown]
        inputs = [len(a["meta_info"]["input_token_logprobs"]) for a in shown]
        counts = [a["meta_info"]["completion_tokens"] for a in shown]
        assert counts == [1, 2, 3]
        text = TOKENIZER.decode([100, 101, 102], skip_special_tokens=True)
        if is_incremental:
            assert ids == [[100], [101], [102]]
            assert tops == [1, 1, 1] and inputs == [2, 0, 0]
            assert "".join(a["text"] for a in shown) == text
        else:
            assert ids == [[100], [100, 101], [100, 101, 102]]
            assert tops == [1, 2, 3] and inputs == [2, 2, 2]
            assert shown[-1]["text"] == text

    run(work())


def test_a_large_answer_is_built_aside() -> None:
    async def work() -> None:
        wire = Wire()
        loop_thread = threading.get_ident()
        side = wire.manager.side_work
        assert await side.run(LARGE - 1, threading.get_ident) == loop_thread
        assert await side.run(LARGE, threading.get_ident) != loop_thread
        # Errors come out where they are awaited.
        with pytest.raises(KeyError):
            await side.run(LARGE, lambda: {}["no"])

    run(work())


def test_a_large_answer_is_sent_in_pieces() -> None:
    for size in (0, 5, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES // 2):
        body = bytes(i % 251 for i in range(size))
        sent = Sent()
        asyncio.run(JsonResponse(body)({"type": "http"}, never, sent))
        assert b"".join(sent.bodies) == body
        assert max(map(len, sent.bodies)) <= PIECE_BYTES


def test_logprobs_of_a_long_answer_are_the_same_in_slices() -> None:
    count = 2 * SLICE_TOKENS + 3
    tokens = [(-0.25 * i, 100 + i % 50) for i in range(count)]
    tops = [[(-0.5, 99), (-1.0, 98)] if i % 3 else [] for i in range(count)]
    for output_top in (tops, []):
        whole = LogprobDelta(output_token=tokens, output_top=output_top)
        shown = json.loads(
            JsonResponse(event(chat_logprobs(TOKENIZER, whole))).body[6:]
        )
        expected = []
        for at in range(0, count, 100):
            part = LogprobDelta(
                output_token=tokens[at : at + 100], output_top=output_top[at : at + 100]
            )
            expected += chat_logprobs(TOKENIZER, part)["content"]
        assert shown == {"content": expected, "refusal": None}


def test_streams_of_a_server_share_one_rate() -> None:
    wire = Wire()
    front = Front(
        server_args=wire.manager.server_args, manager=wire.manager, model_name="m"
    )

    async def work() -> None:
        group = await wire.manager.submit([prompt(stream=True)])

        async def nothing() -> AsyncIterator[bytes]:
            yield b""

        streams = [front.stream(nothing(), group) for _ in range(2)]
        assert len({id(stream.share) for stream in streams}) == 1

    run(work())
