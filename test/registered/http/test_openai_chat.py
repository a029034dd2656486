"""`/v1/chat/completions` through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from live_server import CONTEXT, Server, greedy
from openai_world import FIXED, KEY, MESSAGES, PROMPT, native, start_openai_server

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="cpu")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_openai_server(start_server)


def test_chat(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(
        model="mock", messages=MESSAGES, max_tokens=20, **FIXED
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == native(server, PROMPT, max_new_tokens=20)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.prompt_tokens_details is not None


def test_chat_content_parts_and_developer_role(
    client: openai.OpenAI, server: Server
) -> None:
    parts = [{"type": "text", "text": "write "}, {"type": "text", "text": "a"}]
    messages: list[Any] = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": parts},
    ]
    answer = client.chat.completions.create(
        model="mock", messages=messages, max_completion_tokens=8, **FIXED
    )
    prompt = "system: short\nuser: write a\nassistant: "
    expected = native(server, prompt, max_new_tokens=8)
    assert answer.choices[0].message.content == expected


def test_a_message_without_tool_calls_may_say_so(
    client: openai.OpenAI, server: Server
) -> None:
    messages: list[Any] = [
        {"role": "assistant", "content": "hi", "tool_calls": []},
        {"role": "user", "content": "on", "tool_calls": None},
    ]
    answer = client.chat.completions.create(
        model="mock", messages=messages, max_tokens=4, **FIXED
    )
    expected = native(server, "assistant: hi\nuser: on\nassistant: ", max_new_tokens=4)
    assert answer.choices[0].message.content == expected


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"reasoning_effort": "low", "verbosity": "low"}, "think: low\n"),
        (
            {
                "reasoning_effort": "low",
                "chat_template_kwargs": {"reasoning_effort": "max"},
            },
            "think: max\n",
        ),
    ],
)
def test_the_template_sees_the_reasoning_effort(
    client: openai.OpenAI, server: Server, fields: dict[str, Any], effort: str
) -> None:
    extra = {"ignore_eos": True, **fields}
    answer = client.chat.completions.create(
        model="mock", messages=MESSAGES, max_tokens=8, temperature=0, extra_body=extra
    )
    expected = native(server, effort + PROMPT, max_new_tokens=8)
    assert answer.choices[0].message.content == expected


def test_chat_stream(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        max_tokens=25,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        **FIXED,
    )
    chunks = list(stream)
    roles = [c.choices[0].delta.role for c in chunks[:2]]
    assert roles == ["assistant", "assistant"]
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    expected = native(server, PROMPT, max_new_tokens=25)
    assert texts == {0: expected, 1: expected}
    assert reasons == {0: "length", 1: "length"}
    usage = chunks[-1].usage
    assert usage is not None and not chunks[-1].choices
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 50)


def test_chat_without_a_limit_runs_to_the_end_of_the_context(
    client: openai.OpenAI,
) -> None:
    messages: list[Any] = [{"role": "user", "content": "x" * (CONTEXT - 40)}]
    answer = client.chat.completions.create(model="mock", messages=messages, **FIXED)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.total_tokens == CONTEXT


@pytest.mark.parametrize("n", [1, 3])
def test_token_ids(client: openai.OpenAI, server: Server, n: int) -> None:
    """vLLM's `return_token_ids`: the prompt's once, those of the outputs as they come;
    and nothing of both where nobody asks."""
    asked: dict[str, Any] = {"model": "mock", "messages": MESSAGES, "max_tokens": 6}
    asked |= {"n": n, "seed": 3}
    plain = client.chat.completions.create(**asked).model_dump()
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]
    asked["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
    whole = client.chat.completions.create(**asked).model_dump()
    assert bytes(whole["prompt_token_ids"]).decode() == PROMPT
    ids = {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    assert [len(each) for each in ids.values()] == [6] * n
    chunks = [
        chunk.model_dump()
        for chunk in client.chat.completions.create(**asked, stream=True)
    ]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    streamed: dict[int, list[int]] = {index: [] for index in ids}
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == ids


def hidden_state(server: Server, text: str, length: int) -> list[float]:
    """Of the last token, as `/generate` shows it among all others."""
    body = {
        "text": text,
        "sampling_params": greedy(max_new_tokens=length),
        "return_hidden_states": True,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    meta = server.post("/generate", body, headers=headers).json()["meta_info"]
    assert len(meta["hidden_states"]) == len(text) + length - 1
    last: list[float] = meta["hidden_states"][-1]
    return last


@pytest.mark.parametrize("stream", [False, True])
def test_hidden_states(client: openai.OpenAI, server: Server, stream: bool) -> None:
    """That of the last token, in a stream with the end."""
    asked: dict[str, Any] = {"model": "mock", "max_tokens": 5, "temperature": 0}
    asked["extra_body"] = {"return_hidden_states": True, "ignore_eos": True}
    chat = client.chat.completions.create(messages=MESSAGES, stream=stream, **asked)
    plain = client.completions.create(prompt="abc", stream=stream, **asked)
    if stream:
        last = [list(answers)[-1] for answers in (chat, plain)]
        choices = [chunk.model_dump()["choices"][0] for chunk in last]
        assert all(choice["finish_reason"] for choice in choices)
        found = [choices[0]["delta"]["hidden_states"], choices[1]["hidden_states"]]
    else:
        choices = [answer.model_dump()["choices"][0] for answer in (chat, plain)]
        found = [choice["hidden_states"] for choice in choices]
    assert found[0] == pytest.approx(hidden_state(server, PROMPT, 5), abs=1e-4)
    assert found[1] == pytest.approx(hidden_state(server, "abc", 5), abs=1e-4)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
        **FIXED,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 5
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        temperature=0,
        max_tokens=400,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
        extra_body={"regex": None},
    )
    content = answer.choices[0].message.content
    assert content is not None
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content)["ok"], bool)
    else:  # white space is allowed between tokens of JSON, and nothing stops this model
        assert content.lstrip().startswith("{")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
