"""TokenizerManager against a scheduler played by the test, message by message."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from sglang.srt.managers.errors import (
    ApiError,
    BadRequest,
    ClientDisconnected,
    EngineFailure,
    Unavailable,
)
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchOutput,
    FinishReason,
    FlushCacheReq,
    FlushCacheRsp,
    GenerateReq,
    LogprobDelta,
    RequestOutput,
    SchedulerReady,
    SchedulerRequest,
    decode_request,
    encode,
)
from sglang.srt.managers.prompt_request import PromptRequest
from sglang.srt.managers.request_state import Update
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.metrics.front_metrics import FrontMetrics
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

FOLDER = str(bundled_demo_model_path())
TOKENIZER = load_tokenizer(FOLDER)
READY = SchedulerReady(
    context_len=100, max_req_input_len=99, max_total_num_tokens=1000, vocab_size=4096
)
LENGTH = FinishReason(type="length", length=1)


class Wire:
    """What the manager sent; every message crosses the encoding."""

    def __init__(self, *, tokenizer: Any = TOKENIZER, **flags: Any) -> None:
        self.sent: list[SchedulerRequest] = []
        args = ServerArgs(model_path=FOLDER, **flags)
        self.manager = TokenizerManager(
            server_args=args,
            tokenizer=tokenizer,
            send=lambda ms: self.sent.extend(decode_request(encode(m)) for m in ms),
            metrics=FrontMetrics("m"),
        )
        self.manager.set_ready(READY)

    def generated(self) -> list[GenerateReq]:
        return [m for m in self.sent if isinstance(m, GenerateReq)]

    def aborted(self) -> list[str]:
        return [m.rid for m in self.sent if isinstance(m, AbortReq)]

    def answer(
        self,
        rid: str,
        ids: list[int],
        finish: FinishReason | None = LENGTH,
        **fields: Any,
    ) -> None:
        output = RequestOutput(
            rid=rid,
            output_ids=ids,
            prompt_tokens=1,
            completion_tokens=len(ids),
            cached_tokens=0,
            finish_reason=finish,
            **fields,
        )
        self.manager.receive(BatchOutput(outputs=[output]))


def prompt(
    text: str | list[int] = "x", params: dict[str, Any] | None = None, **fields: Any
) -> PromptRequest:
    return PromptRequest(
        prompt=text,
        sampling_params=SamplingParams(**({"max_new_tokens": 5} | (params or {}))),
        **fields,
    )


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def submit_error(wire: Wire, request: PromptRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await wire.manager.submit([request])
    assert not wire.generated()
    return caught.value


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (prompt(""), "the prompt is empty"),
        (prompt([]), "the prompt is empty"),
        (prompt([1] * 100), "100 tokens, but at most 99"),
        (prompt("x " * 500_000), "1000000 characters, but at most 99"),
        (prompt([5, 4096]), "input_ids holds 4096, outside the vocabulary of 4096"),
        (prompt([-1]), "input_ids holds -1"),
        (prompt([1] * 90, {"max_new_tokens": 11}), "11, but .* 90 tokens at most 10"),
        (prompt(rid=""), "rid must have 1 to 256"),
        (prompt(top_logprobs_num=-1), "top_logprobs_num must be between 0 and"),
        (prompt([1, 2], logprob_start_len=2), "below the 2 tokens"),
        (
            prompt(params={"stop_token_ids": [5000]}),
            "stop_token_ids holds token id 5000",
        ),
    ],
)
def test_bad_prompts_are_refused_with_numbers(
    request_: PromptRequest, message: str
) -> None:
    async def work() -> None:
        error = await submit_error(Wire(), request_)
        assert error.status == 400
        assert isinstance(error, ValueError)
        assert re.search(message, error.message), error.message

    run(work())


def test_a_default_length_shrinks_to_the_room() -> None:
    async def work() -> None:
        wire = Wire()
        request = prompt([1] * 97, {"max_new_tokens": 128}, is_length_exact=False)
        await wire.manager.submit([request])
        assert wire.generated()[0].sampling_params.max_new_tokens == 3

    run(work())


def test_what_drafts_reserve_is_no_room() -> None:
    async def work() -> None:
        wire = Wire()
        ready = msgspec.structs.replace(
            READY, max_total_num_tokens=100, max_req_input_len=59
        )
        wire.manager.set_ready(ready)
        error = await submit_error(wire, prompt([1] * 40, {"max_new_tokens": 21}))
        assert error.param == "max_new_tokens" and "at most 20 fit" in error.message
        await wire.manager.submit([prompt([1] * 40, {"max_new_tokens": 20})])

    run(work())


def test_the_pool_limits_like_the_context() -> None:
    async def work() -> None:
        wire = Wire()
        ready = msgspec.structs.replace(
            READY, max_total_num_tokens=50, max_req_input_len=50
        )
        wire.manager.set_ready(ready)
        # The last new token needs no slot.
        error = await submit_error(wire, prompt([1] * 40, {"max_new_tokens": 12}))
        assert "at most 11 fit" in error.message
        await wire.manager.submit([prompt([1] * 40, {"max_new_tokens": 11})])
        assert len(wire.generated()) == 1

    run(work())


def test_n_outputs_share_the_prompt_and_differ_in_seed() -> None:
    async def work() -> None:
        wire = Wire()
        request = prompt("ab", {"n": 3, "sampling_seed": 7}, rid="job")
        group = await wire.manager.submit([request])
        sent = wire.generated()
        assert [r.rid for r in sent] == ["job-0", "job-1", "job-2"]
        assert [r.sampling_params.sampling_seed for r in sent] == [7, 8, 9]
        for i, request_ in enumerate(reversed(sent)):
            wire.answer(request_.rid, [100 + i])
        results = await wire.manager.results(group)
        assert [u.output_ids for u in results] == [[102], [101], [100]]
        assert wire.manager.num_in_flight == 0

    run(work())


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


def test_beyond_the_capacity_requests_get_503() -> None:
    async def work() -> None:
        wire = Wire(max_queued_requests=2, max_running_requests=1)
        for i in range(3):
            await wire.manager.submit([prompt(rid=str(i))])
        with pytest.raises(Unavailable, match="3 requests are in flight"):
            await wire.manager.submit([prompt()])
        wire.answer("0", [1])
        await wire.manager.submit([prompt()])
        with pytest.raises(BadRequest, match="asks for 4 outputs, but at most 3"):
            await wire.manager.submit([prompt("x", {"n": 4})])

    run(work())


def test_waiting_for_room_sends_the_rest_later() -> None:
    async def work() -> None:
        wire = Wire(max_queued_requests=3, max_running_requests=1)
        prompts = [prompt([i + 1], rid=str(i)) for i in range(10)]
        group = await wire.manager.submit(prompts, wait_for_room=True)
        results = asyncio.create_task(wire.manager.results(group))
        answered = 0
        while answered < 10:
            await asyncio.sleep(0)
            sent = wire.generated()
            assert len(sent) - answered <= 3
            for request in sent[answered:]:
                wire.answer(request.rid, list(request.input_ids))
                answered += 1
        assert [u.output_ids for u in await results] == [[i + 1] for i in range(10)]

    run(work())


def test_abandoning_a_waiting_group_stops_the_feeding() -> None:
    async def work() -> None:
        wire = Wire(max_queued_requests=2, max_running_requests=1)
        prompts = [prompt(rid=str(i)) for i in range(6)]
        group = await wire.manager.submit(prompts, wait_for_room=True)
        await asyncio.sleep(0)
        wire.manager.release(group)
        for request in wire.generated():
            wire.answer(request.rid, [], FinishReason(type="abort", status_code=499))
        await asyncio.sleep(0)
        assert len(wire.generated()) == 2
        assert wire.manager.num_in_flight == 0

    run(work())


def test_an_abort_reaches_requests_that_were_not_sent_yet() -> None:
    async def work() -> None:
        wire = Wire(max_queued_requests=2, max_running_requests=1)
        prompts = [prompt(rid=str(i)) for i in range(6)]
        group = await wire.manager.submit(prompts, wait_for_room=True)
        await asyncio.sleep(0)
        wire.manager.abort("4")
        wire.manager.abort(abort_all=True)
        gone = FinishReason(type="abort", message="aborted", status_code=499)
        for rid in ("0", "1"):
            wire.answer(rid, [], gone)
        results = await wire.manager.results(group)
        reasons = [update.finish_reason for update in results]
        assert [reason and reason.type for reason in reasons] == ["abort"] * 6
        assert len(wire.generated()) == 2
        assert wire.manager.num_in_flight == 0

    run(work())


def test_a_dead_engine_fails_everything_with_a_logged_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        wire = Wire(max_queued_requests=2, max_running_requests=1)
        one = await wire.manager.submit([prompt(rid="a")])
        many = await wire.manager.submit(
            [prompt(rid=str(i)) for i in range(5)], wait_for_room=True
        )
        call = asyncio.create_task(wire.manager.flush_cache())
        await asyncio.sleep(0)
        failure = wire.manager.set_dead("the scheduler process died")
        for group in (one, many):
            with pytest.raises(EngineFailure) as caught:
                await wire.manager.results(group)
            assert caught.value is failure
        with pytest.raises(EngineFailure):
            await call
        with pytest.raises(EngineFailure):
            await wire.manager.submit([prompt()])
        error_id = failure.message.split("error id ")[1].rstrip(")")
        assert error_id in caplog.text
        assert not wire.aborted()

    with caplog.at_level(logging.ERROR, logger="sglang"):
        logging.getLogger("sglang").propagate = True
        run(work())


def test_what_came_before_the_engine_failed_is_read_first() -> None:
    """Also by a reader that was busy when both came."""

    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(rid="a", stream=True)])
        wire.answer("a", [1], None)
        read: list[int] = []
        with pytest.raises(EngineFailure):
            async for updates in wire.manager.updates(group):
                read += [token for update in updates for token in update.output_ids]
                if read == [1]:
                    wire.answer("a", [2], None)
                    wire.manager.set_dead("the scheduler failed")
        assert read == [1, 2]

    run(work())


def test_draining_refuses_new_requests_and_waits_for_the_old() -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(rid="a")])
        wire.manager.set_draining()
        with pytest.raises(Unavailable, match="shutting down"):
            await wire.manager.submit([prompt()])
        assert not await wire.manager.wait_idle(0.01)
        waiting = asyncio.create_task(wire.manager.wait_idle(5))
        await asyncio.sleep(0)
        wire.answer("a", [1])
        assert await waiting
        assert len(await wire.manager.results(group)) == 1

    run(work())


def test_requests_before_the_engine_is_ready_get_503() -> None:
    async def work() -> None:
        args = ServerArgs(model_path=FOLDER)
        manager = TokenizerManager(
            server_args=args, tokenizer=TOKENIZER, send=lambda messages: None
        )
        with pytest.raises(Unavailable, match="starting"):
            await manager.submit([prompt()])

    run(work())


def test_control_calls_find_their_answers_and_time_out() -> None:
    async def work() -> None:
        wire = Wire()
        first = asyncio.create_task(wire.manager.flush_cache())
        second = asyncio.create_task(wire.manager.flush_cache())
        await asyncio.sleep(0)
        ids = [m.call_id for m in wire.sent if isinstance(m, FlushCacheReq)]
        wire.manager.receive(FlushCacheRsp(call_id=ids[1], success=False))
        wire.manager.receive(FlushCacheRsp(call_id=ids[0], success=True))
        wire.manager.receive(FlushCacheRsp(call_id=99, success=True))
        assert (await first, await second) == (True, False)
        with pytest.raises(Unavailable, match="did not answer"):
            await wire.manager.scheduler_stats(0.01)

    run(work())


def test_without_a_tokenizer_only_ids_are_served() -> None:
    async def work() -> None:
        wire = Wire(tokenizer=None, skip_tokenizer_init=True)
        with pytest.raises(BadRequest, match="--skip-tokenizer-init"):
            await wire.manager.submit([prompt("text")])
        with pytest.raises(BadRequest, match="use stop_token_ids"):
            await wire.manager.submit([prompt([1], {"stop": ["x"]})])
        group = await wire.manager.submit([prompt([1], rid="a")])
        wire.answer("a", [7])
        (result,) = await wire.manager.results(group)
        assert isinstance(result, Update)
        assert (result.text, result.output_ids) == ("", [7])

    run(work())


def test_a_long_text_is_tokenized_beside_the_loop() -> None:
    """While one long text is tokenized, other requests are sent."""

    async def work() -> None:
        wire = Wire()
        wire.manager.set_ready(
            msgspec.structs.replace(
                READY,
                context_len=500_000,
                max_req_input_len=499_999,
                max_total_num_tokens=500_000,
            )
        )
        long = asyncio.create_task(wire.manager.submit([prompt("a = b\n" * 50_000)]))
        await asyncio.sleep(0)
        await wire.manager.submit([prompt("short", rid="short")])
        assert [r.rid for r in wire.generated()] == ["short"]
        await long
        assert len(wire.generated()) == 2

    run(work())


def test_latencies_are_recorded() -> None:
    async def work() -> None:
        wire = Wire()
        await wire.manager.submit([prompt(stream=True, rid="a"), prompt(rid="b")])
        wire.answer("a", [1], None)
        wire.answer("a", [2, 3])
        wire.answer("b", [1, 2, 3])
        assert wire.manager.metrics is not None
        text = wire.manager.metrics.render(None).decode()
        label = '_count{model_name="m"}'
        assert f"sglang:time_to_first_token_seconds{label} 1.0" in text
        assert f"sglang:inter_token_latency_seconds{label} 2.0" in text
        assert f"sglang:e2e_request_latency_seconds{label} 2.0" in text
        assert "sglang:num_running_reqs" not in text

    run(work())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
