"""TokenizerManager: request ids, answers, streams and aborts, message by message."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from manager_world import LENGTH, TOKENIZER, Wire, prompt, run

from sglang.srt.managers.front.prompt_request import prompt_rids
from sglang.srt.managers.messages.errors import (
    BadRequest,
    ClientDisconnected,
    EngineFailure,
    Unavailable,
)
from sglang.srt.managers.messages.io_struct import FinishReason, LogprobDelta
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")


def test_a_rid_in_use_is_refused_until_the_scheduler_is_done_with_it() -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(rid="a")])
        with pytest.raises(BadRequest, match="'a' is in use"):
            await wire.manager.submit([prompt(rid="a")])
        wire.manager.release(group)
        assert wire.aborted() == ["a"]
        # The aborted request still holds the name: its last message is on its way.
        with pytest.raises(BadRequest, match="'a' is in use"):
            await wire.manager.submit([prompt(rid="a")])
        wire.answer("a", [], FinishReason(type="abort", status_code=499))
        await wire.manager.submit([prompt(rid="a")])

    run(work())


@pytest.mark.parametrize("wait_for_room", [False, True])
def test_a_message_that_cannot_be_sent_leaves_nothing_behind(
    wait_for_room: bool,
) -> None:
    """No integer beyond 64 bits fits into msgpack; whoever waits gets the error."""

    async def work() -> None:
        wire = Wire(max_queued_requests=1, max_running_requests=1)
        bad = [prompt("x", {"top_k": 2**70}, rid=str(i)) for i in range(2)]
        with pytest.raises((OverflowError, EngineFailure)):
            group = await wire.manager.submit(bad, wait_for_room=wait_for_room)
            await wire.manager.results(group)
        assert wire.manager.num_in_flight == 0
        assert not wire.aborted()
        for _ in range(5):
            group = await wire.manager.submit([prompt(rid="0")])
            wire.answer("0", [1])
            await wire.manager.results(group)

    run(work())


@pytest.mark.parametrize(("first", "count"), [([1], 2), ([1, 2], 1)])
def test_tokens_that_are_lost_or_repeated_fail_their_request_alone(
    first: list[int], count: int
) -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(rid="a", stream=True)])
        other = await wire.manager.submit([prompt(rid="b")])
        wire.answer("a", first, None, completion_tokens=count)
        wire.answer("b", [7])
        with pytest.raises(EngineFailure, match=r"request a: \d tokens arrived, but"):
            await wire.manager.results(group)
        (update,) = await wire.manager.results(other)
        assert update.output_ids == [7]

    run(work())


def test_two_prompts_with_one_rid_are_refused() -> None:
    async def work() -> None:
        with pytest.raises(BadRequest, match="in use"):
            await Wire().manager.submit([prompt(rid="a"), prompt(rid="a")])

    run(work())


def test_a_slow_reader_finds_the_news_merged() -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(stream=True, rid="a")])
        tokens = TOKENIZER.encode("hello world of tokens")
        news = wire.manager.updates(group)
        wire.answer("a", tokens[:1], None)
        first = await anext(news)
        for token in tokens[1:-1]:
            delta = LogprobDelta(output_token=[(-1.0, token)])
            wire.answer("a", [token], None, logprobs=delta)
        second = await anext(news)
        wire.answer("a", tokens[-1:])
        third = await anext(news)
        assert [len(batch) for batch in (first, second, third)] == [1, 1, 1]
        assert second[0].output_ids == tokens[1:-1]
        assert second[0].logprobs is not None
        assert len(second[0].logprobs.output_token) == len(tokens) - 2
        text = "".join(batch[0].text for batch in (first, second, third))
        assert text == "hello world of tokens"
        with pytest.raises(StopAsyncIteration):
            await anext(news)

    run(work())


def test_a_stream_of_several_keeps_them_apart() -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit(
            [prompt(stream=True, rid=rid) for rid in ("a", "b")]
        )
        seen: dict[int, list[int]] = {0: [], 1: []}

        async def read() -> None:
            async for news in wire.manager.updates(group):
                for update in news:
                    seen[update.index] += update.output_ids

        reader = asyncio.create_task(read())
        for i in range(5):
            wire.answer("a", [10 + i], LENGTH if i == 4 else None)
            wire.answer("b", [20 + i], LENGTH if i == 4 else None)
            await asyncio.sleep(0)
        await reader
        assert seen == {0: [10, 11, 12, 13, 14], 1: [20, 21, 22, 23, 24]}

    run(work())


def test_one_refused_request_fails_its_group_and_aborts_the_others() -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(rid="a"), prompt(rid="b")])
        refusal = FinishReason(type="abort", message="full", status_code=503)
        wire.answer("a", [], refusal)
        with pytest.raises(Unavailable, match="full") as caught:
            await wire.manager.results(group)
        assert caught.value.headers["Retry-After"] == "1"
        assert wire.aborted() == ["b"]

    run(work())


def test_an_abort_by_the_client_is_an_answer() -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(rid="a"), prompt(rid="ab")])
        wire.manager.abort("a")
        assert wire.aborted() == ["a"]
        gone = FinishReason(type="abort", message="aborted", status_code=499)
        wire.answer("a", [], gone)
        wire.answer("ab", [1])
        results = await wire.manager.results(group)
        assert [u.finish_reason and u.finish_reason.type for u in results] == [
            "abort",
            "length",
        ]

    run(work())


def test_a_base_rid_aborts_all_its_outputs() -> None:
    async def work() -> None:
        wire = Wire()
        await wire.manager.submit([prompt("x", {"n": 2}, rid="job")])
        wire.manager.abort("job")
        assert wire.aborted() == ["job-0", "job-1"]

    run(work())


def test_an_abort_ends_what_it_names_and_nothing_else() -> None:
    async def work() -> None:
        wire = Wire()
        named = prompt_rids("x", 2, is_list=True)
        assert named == [("x_0", "x"), ("x_1", "x")]
        await wire.manager.submit(
            [
                prompt("x", {"n": 2}, rid=rid, list_rid=list_rid)
                for rid, list_rid in named
            ]
        )
        await wire.manager.submit([prompt(rid="x_00"), prompt(rid="x_"), prompt()])
        ended = []
        for rid in ("x_1", "x_0-1", "x_", "x", "", "x_0-", "_0"):
            before = len(wire.aborted())
            wire.manager.abort(rid)
            ended.append(wire.aborted()[before:])
        rows = ["x_0-0", "x_0-1", "x_1-0", "x_1-1"]
        assert ended == [rows[2:], rows[1:2], ["x_"], rows, [], [], []]

    run(work())


@pytest.mark.parametrize(
    ("rid", "count", "is_list", "rids"),
    [
        (None, 2, True, [None, None]),
        ("", 2, True, [None, None]),
        ("a", 1, False, ["a"]),
        ("a", 1, True, ["a_0"]),
        (["a", "b"], 2, True, ["a", "b"]),
        (["a", ""], 2, True, ["a", None]),
    ],
)
def test_the_rids_of_a_call(
    rid: str | list[str] | None, count: int, is_list: bool, rids: list[str | None]
) -> None:
    assert [own for own, _ in prompt_rids(rid, count, is_list=is_list)] == rids


def test_a_list_of_rids_has_one_for_each_prompt() -> None:
    for count, is_list in ((1, True), (3, True), (2, False)):
        with pytest.raises(BadRequest, match="rid has 2 entries for"):
            prompt_rids(["a", "b"], count, is_list=is_list)


def test_a_reader_that_leaves_aborts() -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(stream=True, rid="a")])
        group.fail(ClientDisconnected())
        with pytest.raises(ClientDisconnected):
            async for _ in wire.manager.updates(group):
                pass
        assert wire.aborted() == ["a"]
        wire.manager.release(group)
        assert wire.aborted() == ["a"]

    run(work())


def test_latencies_are_recorded() -> None:
    async def work() -> None:
        wire = Wire()
        await wire.manager.submit([prompt(stream=True, rid="a"), prompt(rid="b")])
        wire.answer("a", [1], None)
        wire.answer("a", [2, 3])
        # A whole answer: its first token came long before it.
        began = time.monotonic()
        await asyncio.sleep(0.05)
        wire.answer("b", [1, 2, 3], first_token_at=began)
        assert wire.manager.metrics is not None
        text = wire.manager.metrics.render(None).decode()
        label = '_count{model_name="m"}'
        assert f"sglang:time_to_first_token_seconds{label} 2.0" in text
        assert f"sglang:inter_token_latency_seconds{label} 2.0" in text
        assert f"sglang:e2e_request_latency_seconds{label} 2.0" in text
        assert f"sglang:time_per_output_token_seconds{label} 2.0" in text
        sums = dict(re.findall(r"sglang:(\w+)_sum{.*} (\S+)", text))
        e2e = float(sums["e2e_request_latency_seconds"])
        assert float(sums["time_to_first_token_seconds"]) < e2e - 0.04

    run(work())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
