"""Keys of chat answers that clients read without asking whether they are there."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from chat_world import ChatWorld, body, function

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

KEYS = {"role", "content", "reasoning_content", "tool_calls"}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
OUTPUTS: dict[str, str] = {
    "text": "Yes.",
    "reasoning": "<think>Hm.</think>Yes.",
    "call": f"I look.{CALL}",
    "all": f"<think>Hm.</think>I look.{CALL}",
}
FLAGS: dict[str, Any] = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}


@pytest.fixture(params=OUTPUTS)
def output(request: pytest.FixtureRequest) -> str:
    return OUTPUTS[request.param]


@pytest.mark.parametrize("flags", [{}, FLAGS], ids=["plain", "parsers"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_every_delta_has_every_key(
    output: str, logprobs: bool, flags: dict[str, Any]
) -> None:
    asked = body(function("weather"), stream=True, logprobs=logprobs)
    response = ChatWorld(output, **flags).ask(asked)
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    choices = [
        choice
        for line in lines
        for choice in json.loads(line.removeprefix("data: "))["choices"]
    ]
    for choice in choices:
        assert set(choice["delta"]) == KEYS
        assert {"logprobs", "finish_reason", "matched_stop"} < set(choice)
    first, *others = (choice["delta"] for choice in choices)
    assert (first["role"], first["content"]) == ("assistant", "")
    assert all(delta["role"] is None for delta in others)
    # The last one says why the output ended, and nothing else.
    assert set(others[-1].values()) == {None}


@pytest.mark.parametrize("flags", [{}, FLAGS], ids=["plain", "parsers"])
def test_every_message_has_every_key(output: str, flags: dict[str, Any]) -> None:
    answer = ChatWorld(output, **flags).ask(body(function("weather"))).json()
    message = answer["choices"][0]["message"]
    assert KEYS | {"refusal"} == set(message)
    has_calls = bool(flags) and CALL in output
    assert (message["tool_calls"] is not None) == has_calls
    assert bool(message["reasoning_content"]) == (bool(flags) and "Hm." in output)


def test_the_stream_helper_of_openais_client_reads_nulls() -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        tools: Any = [function("weather")]
        async with client.chat.completions.stream(
            model="m", messages=[{"role": "user", "content": "hi"}], tools=tools
        ) as stream:
            thoughts = [
                event.chunk.choices[0].delta.reasoning_content  # type: ignore[attr-defined]
                async for event in stream
                if event.type == "chunk"
            ]
            return thoughts, await stream.get_final_completion()

    thoughts, answer = ChatWorld(OUTPUTS["all"], **FLAGS).openai(ask)
    assert "".join(filter(None, thoughts)) == "Hm."
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "I look.")
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
