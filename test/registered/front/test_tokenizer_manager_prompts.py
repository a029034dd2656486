"""TokenizerManager: prompts that are refused, and the form in which others are sent."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from manager_world import READY, Wire, prompt, run

from sglang.srt.managers.front.prompt_request import PromptRequest
from sglang.srt.managers.front.request_state import Update
from sglang.srt.managers.messages.errors import ApiError, BadRequest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")


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
        (
            prompt([1] * 100),
            r"\(100 tokens\) is longer than the model's context length",
        ),
        (
            prompt("x " * 500_000),
            r"\(1000000 characters\) is longer .* at most 99",
        ),
        (prompt([5, 4096]), "input_ids holds 4096, outside the vocabulary of 4096"),
        (prompt([-1]), "input_ids holds -1"),
        (
            prompt([1] * 90, {"max_new_tokens": 11}),
            "11, but a prompt of 90 tokens leaves room for at most 10",
        ),
        (prompt(rid=""), "rid must have 1 to 256"),
        (prompt(top_logprobs_num=-1), "top_logprobs_num must be at least 0"),
        (prompt([1, 2], logprob_start_len=2), "below the 2 tokens"),
        (prompt(params={"logit_bias": {5000: 1.0}}), "logit_bias holds token id 5000"),
    ],
)
def test_bad_prompts_are_refused_with_numbers(
    request_: PromptRequest, message: str
) -> None:
    async def work() -> None:
        error = await submit_error(Wire(strict_max_tokens=True), request_)
        assert error.status == 400
        assert isinstance(error, ValueError)
        assert re.search(message, error.message), error.message

    run(work())


def test_stop_tokens_outside_of_the_vocabulary_are_ignored() -> None:
    async def work() -> None:
        wire = Wire()
        shared = prompt(params={"stop_token_ids": [-1, 7, 4096, 2**62]})
        await wire.manager.submit([shared, shared])
        for sent in wire.generated():
            assert sent.sampling_params.stop_token_ids == [7]

    run(work())


def test_a_default_length_fits_whatever_the_room() -> None:
    async def work() -> None:
        wire = Wire()
        request = prompt([1] * 97, {"max_new_tokens": 128}, is_length_exact=False)
        await wire.manager.submit([request])
        (sent,) = wire.generated()
        assert sent.sampling_params.max_new_tokens == 128, "the engine ends it"

    run(work())


def test_what_drafts_reserve_is_no_room() -> None:
    async def work() -> None:
        wire = Wire(strict_max_tokens=True)
        ready = msgspec.structs.replace(
            READY, max_total_num_tokens=100, max_req_input_len=59
        )
        wire.manager.set_ready(ready)
        error = await submit_error(wire, prompt([1] * 40, {"max_new_tokens": 21}))
        assert (
            error.param == "max_new_tokens" and "room for at most 20 (" in error.message
        )
        await wire.manager.submit([prompt([1] * 40, {"max_new_tokens": 20})])

    run(work())


def test_the_pool_limits_like_the_context() -> None:
    async def work() -> None:
        wire = Wire(strict_max_tokens=True)
        ready = msgspec.structs.replace(
            READY, max_total_num_tokens=50, max_req_input_len=50
        )
        wire.manager.set_ready(ready)
        # The last new token needs no slot.
        error = await submit_error(wire, prompt([1] * 40, {"max_new_tokens": 12}))
        assert "room for at most 11 (" in error.message
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
        assert [r.seed for r in sent] == [7, 8, 9]
        for i, request_ in enumerate(reversed(sent)):
            wire.answer(request_.rid, [100 + i])
        results = await wire.manager.results(group)
        assert [u.output_ids for u in results] == [[102], [101], [100]]
        assert wire.manager.num_in_flight == 0

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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
