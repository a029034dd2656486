"""TokenizerManager: requests that wait for room, and an engine that starts, drains or
dies."""

from __future__ import annotations

import asyncio
import logging

import pytest
from manager_world import FOLDER, TOKENIZER, Wire, prompt, run

from sglang.srt.managers.front.caller import PEER
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.messages.errors import BadRequest, EngineFailure, Unavailable
from sglang.srt.managers.messages.io_struct import (
    EngineFailed,
    FinishReason,
    FlushCacheReq,
    FlushCacheRsp,
    LogprobDelta,
    decode_response,
    encode,
)
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")


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


def test_one_client_cannot_fill_the_queue_for_all() -> None:
    """Requests and tokens: a sixteenth more is there for those who hold little."""

    async def work() -> None:
        limits = {"max_queued_requests": 32, "max_queued_tokens": 320}
        for size, count in ((1, 33), (10, 32)):
            wire = Wire(max_running_requests=1, **limits)

            async def submit(client: str, n: int, wire: Wire, size: int) -> None:
                PEER.set(client)
                await wire.manager.submit([prompt([1] * size, {"n": n})])

            def ask(
                client: str, n: int = 1, *, wire: Wire = wire, size: int = size
            ) -> asyncio.Task[None]:
                return asyncio.create_task(submit(client, n, wire, size))

            await ask("a", count)
            with pytest.raises(Unavailable):
                await ask("a")
            with pytest.raises(Unavailable):
                await ask("b", 3)
            await ask("b")
            await ask("c")
            with pytest.raises(Unavailable):
                await ask("c", 2)
            with pytest.raises(Unavailable):
                await ask("d")

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


def test_one_output_asks_for_the_logprobs_of_its_prompt() -> None:
    """The others wait for it in a stream, unless it ends without or the engine dies."""

    async def work() -> None:
        wire = Wire()
        options = {"return_logprob": True, "logprob_start_len": 0, "stream": True}
        scored = LogprobDelta(
            input_token=[(None, 1), (-0.5, 2)], input_top=[None, []], output_token=[]
        )
        bare = LogprobDelta()
        for end in ("scored", "aborted", "dead"):
            group = await wire.manager.submit(
                [prompt([1, 2], {"n": 3}, rid=end, **options)]
            )
            asked = [request.logprob_start_len for request in wire.generated()[-3:]]
            assert asked == [0, -1, -1]
            wire.answer(f"{end}-1", [7], logprobs=bare)
            updates = wire.manager.updates(group)
            first = asyncio.create_task(anext(updates))
            await asyncio.sleep(0.01)
            assert not first.done()
            if end == "scored":
                wire.answer(f"{end}-0", [5], None, logprobs=scored)
                shown = {update.rid: update.logprobs for update in await first}
                assert set(shown) == {f"{end}-0", f"{end}-1"}
                for delta in shown.values():
                    assert delta is not None
                    assert delta.input_token == scored.input_token
            elif end == "aborted":
                reason = FinishReason(type="abort", message="m", status_code=499)
                wire.answer(f"{end}-0", [], reason)
                assert {update.rid for update in await first} == {
                    f"{end}-0",
                    f"{end}-1",
                }
            else:
                wire.manager.set_dead("it died")
                assert [update.rid for update in await first] == [f"{end}-1"]
                with pytest.raises(EngineFailure):
                    await anext(updates)
            await updates.aclose()

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


@pytest.mark.parametrize("exit_is_seen_first", [False, True])
def test_incidents_of_an_engine_that_failed(exit_is_seen_first: bool) -> None:
    """They came with its failure, and answer who asked before and who asks later; an
    engine that ended without a word has none to show."""
    incidents = [{"time": "T", "violations": [{"rid": "a"}]}]
    data = encode(EngineFailed(message="kv_canary violation", incidents=incidents))

    async def work() -> None:
        wire = Wire()
        early = asyncio.create_task(wire.manager.canary_incidents())
        await asyncio.sleep(0)
        if exit_is_seen_first:
            wire.manager.set_dead("the scheduler process died")
            with pytest.raises(EngineFailure):
                await early
        wire.manager.receive(decode_response(data))
        if not exit_is_seen_first:
            assert await early == incidents
        assert await wire.manager.canary_incidents() == incidents
        with pytest.raises(EngineFailure):
            await wire.manager.flush_cache()

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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
