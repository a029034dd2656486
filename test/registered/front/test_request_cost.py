"""Bounds of the cost of a call, checked before anything is built for it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from manager_world import Wire, prompt, run

from sglang.srt.managers.front.prompt_request import PromptRequest
from sglang.srt.managers.messages.errors import BadRequest, Unavailable
from sglang.srt.managers.messages.io_struct import GenerateBatch, decode_request, encode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.salt_chain import tenant_of
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

WHOLE_CONTEXT = 1 << 40


def scored(n: int, top: int, *, start: int = -1, new: int = 5) -> PromptRequest:
    return prompt(
        [1] * 10,
        {"n": n, "max_new_tokens": new},
        return_logprob=True,
        top_logprobs_num=top,
        logprob_start_len=start,
    )


@pytest.mark.parametrize(
    ("flags", "requests", "message"),
    [
        ({}, [scored(1, 21)], "top_logprobs_num is 21, but at most 20 .*-max-logprobs"),
        # 2 outputs of 5 tokens, with 3 alternatives each.
        (
            {"max_logprob_entries": 39},
            [scored(2, 3)],
            "up to 40 log probabilities.*at most 39.*--max-logprob-entries",
        ),
        # The prompt's 10 tokens count for each output.
        (
            {"max_logprob_entries": 119},
            [scored(2, 3, start=0)],
            "up to 120 log probabilities",
        ),
        ({"max_logprob_entries": 79}, [scored(2, 3)] * 2, "up to 80 log probabilities"),
        (
            {"max_call_tokens": 39},
            [prompt([1] * 10, {"n": 2})] * 2,
            "up to 40 tokens.*at most 39.*--max-call-tokens",
        ),
        (
            {"max_token_entries": 2},
            [prompt(params={"stop_token_ids": [1, 2, 3]})],
            "stop_token_ids has 3 entries, but at most 2.*--max-token-entries",
        ),
        (
            {"max_token_entries": 2},
            [prompt(params={"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0}})],
            "logit_bias has 3 entries",
        ),
        (
            {"max_token_entries": 2},
            [dataclasses.replace(scored(1, 0), token_ids_logprob=[1, 2, 3])],
            "token_ids_logprob has 3 entries",
        ),
        (
            {"max_logprob_entries": 39},
            [dataclasses.replace(scored(2, 0), token_ids_logprob=[1, 2, 3])],
            "up to 40 log probabilities",
        ),
        # Each output shows the ids of the prompt.
        (
            {"max_call_tokens": 39},
            [prompt([1] * 10, {"n": 2, "max_new_tokens": 10}, keeps_prompt_ids=True)],
            "up to 40 tokens",
        ),
        (
            {"max_queued_tokens": 19},
            [prompt([1] * 10, {"n": 2})],
            "prompts have 20 tokens, but at most 19.*--max-queued-tokens",
        ),
    ],
)
def test_a_call_beyond_a_limit_names_it(
    flags: dict[str, Any], requests: list[PromptRequest], message: str
) -> None:
    async def work() -> None:
        wire = Wire(**flags)
        with pytest.raises(BadRequest, match=message):
            await wire.manager.submit(requests)
        assert not wire.sent and wire.manager.num_in_flight == 0
        # A bystander is served, and what just fits is.
        await wire.manager.submit([prompt()])
        larger = {name: value + 1 for name, value in flags.items()}
        await Wire(**({"max_logprobs": 21} | larger)).manager.submit(requests)

    run(work())


def test_hidden_states_are_bounded() -> None:
    async def work() -> None:
        wire = Wire(enable_return_hidden_states=True, max_n=2000)
        many = prompt([1] * 10, {"n": 1200}, return_hidden_states=True)
        with pytest.raises(
            BadRequest, match="up to 18000000 numbers of hidden states.*16777216"
        ):
            await wire.manager.submit([many])
        await wire.manager.submit(
            [dataclasses.replace(many, only_last_hidden_state=True)]
        )

    run(work())


def test_prompts_in_flight_are_bounded_in_tokens() -> None:
    async def work() -> None:
        wire = Wire(max_queued_tokens=20)
        await wire.manager.submit([prompt([1] * 15, rid="long")])
        with pytest.raises(Unavailable, match="have 15 tokens, of at most 20"):
            await wire.manager.submit([prompt([1] * 6)])
        await wire.manager.submit([prompt([1] * 5)])
        wire.answer("long", [1])
        await wire.manager.submit([prompt([1] * 15)])

    run(work())


def test_the_offline_engine_has_no_such_limits() -> None:
    async def work() -> None:
        wire = Wire(
            max_queued_tokens=1,
            max_call_tokens=1,
            max_logprob_entries=1,
            max_logprobs=0,
            max_token_entries=1,
        )
        many = [scored(2, 3), prompt(params={"stop_token_ids": [1, 2]})]
        await wire.manager.submit(many, wait_for_room=True)
        await asyncio.sleep(0)
        assert len(wire.generated()) == 3

    run(work())


def test_a_length_of_the_whole_context_shrinks_to_the_logprobs() -> None:
    """A chat without a limit names no length that it could be refused for."""

    async def work() -> None:
        wire = Wire(max_logprob_entries=100)
        request = PromptRequest(
            prompt=[1] * 10,
            sampling_params=SamplingParams(max_new_tokens=WHOLE_CONTEXT, n=2),
            is_length_exact=False,
            return_logprob=True,
            top_logprobs_num=4,
        )
        await wire.manager.submit([request])
        for sent in wire.generated():
            assert sent.sampling_params.max_new_tokens == 10

    run(work())


def test_what_requests_share_travels_once_and_is_one_object() -> None:
    """4,000 prompts with large parameters were 4,000 copies in the scheduler."""

    async def work() -> None:
        wire = Wire(max_queued_requests=400, max_token_entries=4096)
        params = SamplingParams(
            max_new_tokens=5, n=2, stop_token_ids=list(range(2000)), regex="a" * 9000
        )
        requests = [
            PromptRequest(prompt=[i] * 50, sampling_params=params) for i in range(100)
        ]
        await wire.manager.submit(requests)
        (batch,) = wire.sent
        assert isinstance(batch, GenerateBatch)
        assert len(encode(batch)) < 60_000
        sent = wire.generated()
        assert len(sent) == 200
        assert len({id(request.sampling_params) for request in sent}) == 1
        assert len({id(request.input_ids) for request in sent}) == 100
        assert [r.input_ids[0] for r in sent] == [i for i in range(100) for _ in "ab"]

    run(work())


def test_a_packed_request_is_the_request() -> None:
    async def work() -> None:
        wire = Wire(enable_return_hidden_states=True)
        alone = prompt(
            [3, 4],
            {"sampling_seed": 2**63 - 1},
            rid="alone",
            stream=True,
            return_logprob=True,
            logprob_start_len=1,
            top_logprobs_num=2,
            extra_key="tenant",
            return_hidden_states=True,
            only_last_hidden_state=True,
            token_ids_logprob=[7, 8],
            priority=-3,
            input_embeds=b"1234",
        )
        await wire.manager.submit([alone])
        (single,) = wire.generated()
        packed = decode_request(encode(GenerateBatch.pack([single])))
        assert isinstance(packed, GenerateBatch)
        assert list(packed.unpack()) == [single]

    run(work())


def test_a_key_is_told_apart_whatever_its_length() -> None:
    keys = ["a", "b", "a" * 1000, "a" * 1001, "\ud800"]
    names = {tenant_of(key=key) for key in keys}
    assert len(names) == len(keys) and {len(name or "") for name in names} == {32}
    assert tenant_of(key=None) is tenant_of(key="") is None
    assert tenant_of() is tenant_of(salt="", key="", owner="") is None


def test_no_two_pairs_of_salt_and_key_share_prefixes() -> None:
    texts = [
        "",
        "a",
        "0",
        "1",
        "x",
        "0x",
        "a0",
        "1:",
        ":a",
        "1:a",
        "tenant1",
        "tenant10",
    ]
    triples = [(s, k, o) for s in texts for k in texts for o in texts]
    names = {tenant_of(salt=s, key=k, owner=o) for s, k, o in triples}
    assert len(names) == len(triples)


def test_a_stop_that_occurs_twice_counts_once() -> None:
    params = SamplingParams.from_wire(
        {"stop_token_ids": [5, 3] * 1000, "stop": ["b", "a", "b"]}
    )
    assert params.stop_token_ids == [5, 3] and params.stop == ["b", "a"]
