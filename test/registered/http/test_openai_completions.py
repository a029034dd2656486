"""`/v1/completions` through OpenAI's own client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from live_server import Server
from openai_world import FIXED, native, start_openai_server

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="cpu")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_openai_server(start_server)


def test_completion(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(model="mock", prompt="abc", **FIXED)
    (choice,) = answer.choices
    assert choice.text == native(server, "abc", max_new_tokens=16)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")


@pytest.mark.parametrize("prompt", [["a", "b"], [[97], [98]]])
def test_several_prompts_times_n(
    client: openai.OpenAI, server: Server, prompt: Any
) -> None:
    answer = client.completions.create(model="mock", prompt=prompt, n=2, **FIXED)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [native(server, text, max_new_tokens=16) for text in "aabb"]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 64)


def test_completion_stream_with_usage(client: openai.OpenAI, server: Server) -> None:
    stream = client.completions.create(
        model="mock",
        prompt="abc",
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
        **FIXED,
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == native(server, "abc", max_new_tokens=30)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert not last.choices and last.usage is not None
    assert last.usage.completion_tokens == 30
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(
        model="mock",
        prompt="ab",
        max_tokens=3,
        echo=True,
        logprobs=2,
        stream=stream,
        **FIXED,
    )
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    assert choices[0].text.startswith("ab")
    shown = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in shown for token in part.tokens]
    assert tokens[:2] == ["a", "b"] and len(tokens) == 5
    logprobs = [value for part in shown for value in part.token_logprobs]
    assert logprobs[0] is None and all(value <= 0 for value in logprobs[1:])
    offsets = [value for part in shown for value in part.text_offset]
    assert offsets[:3] == [0, 1, 2] and offsets == sorted(offsets)
    assert shown[-1].top_logprobs[-1] is not None


def test_token_ids(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "mock", "prompt": ["ab", "c"], "max_tokens": 4}
    asked |= {"n": 2, "seed": 3}
    asked["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
    whole = client.completions.create(**asked).model_dump()["choices"]
    prompts = [choice["prompt_token_ids"] for choice in whole]
    assert prompts == [[97, 98]] * 2 + [[99]] * 2
    streamed: dict[int, list[int]] = {}
    for chunk in client.completions.create(**asked, stream=True):
        (choice,) = chunk.model_dump()["choices"]
        index = choice["index"]
        is_first = index not in streamed
        assert choice["prompt_token_ids"] == (prompts[index] if is_first else None)
        streamed.setdefault(index, []).extend(choice["token_ids"])
    assert streamed == {choice["index"]: choice["token_ids"] for choice in whole}
    assert [len(ids) for ids in streamed.values()] == [4] * 4


def test_max_tokens_zero_with_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="mock", prompt="abcd", max_tokens=0, echo=True, logprobs=0
    )
    (choice,) = answer.choices
    assert choice.text == "abcd"
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "d"]


def test_extensions_and_seeds(client: openai.OpenAI) -> None:
    def sample(seed: int, **extra: Any) -> str:
        answer = client.completions.create(
            model="mock",
            prompt="x",
            seed=seed,
            extra_body={"ignore_eos": True, "min_p": 0.01, "top_k": 50, **extra},
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    answer = client.completions.create(
        model="mock", prompt="x", extra_body={"regex": "[0-9]{4}"}
    )
    assert answer.choices[0].text.isdigit()


def test_stop_is_reported(client: openai.OpenAI, server: Server) -> None:
    text = native(server, "abc", max_new_tokens=100)
    stop = next(c for c in text[5:] if c.isascii() and c.isprintable())
    answer = client.completions.create(
        model="mock", prompt="abc", max_tokens=100, stop=stop, **FIXED
    )
    (choice,) = answer.choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra == {"matched_stop": stop}


@pytest.mark.parametrize("seed", [-(2**63), -2, 0, 2**63 - 1])
def test_seeds_have_a_sign(client: openai.OpenAI, seed: int) -> None:
    texts = {
        client.completions.create(model="mock", prompt="x", seed=seed).choices[0].text
        for _ in range(2)
    }
    assert len(texts) == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
