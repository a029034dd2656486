"""Calls that a request asks for, against a running server: the grammar makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic
import pytest
from live_server import Server
from openai_world import MESSAGES, start_openai_server

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

LIMITS: dict[str, Any] = {"model": "mock", "temperature": 0, "max_tokens": 1500}


class Step(pydantic.BaseModel):
    """A type of its own makes a reference in the schema."""

    unit: Literal["km", "mile"]


class Route(pydantic.BaseModel):
    fast: bool
    step: Step


# The tiny model says nothing of its own accord: every value is one of few.
TOOLS: list[Any] = [
    openai.pydantic_function_tool(Route, name="route"),
    {"type": "function", "function": {"name": "now"}},
]
ROUTE: Any = {"type": "function", "function": {"name": "route"}}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_openai_server(start_server)


def test_a_named_call_fits_its_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        messages=MESSAGES, tools=TOOLS[:1], tool_choice=ROUTE, **LIMITS
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Route)


def test_a_stream_has_the_calls_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "n": 2} | LIMITS
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked)
    calls = [(choice.message.tool_calls or [])[0] for choice in whole.choices]
    assert {call.function.name for call in calls} <= {"route", "now"}
    for call in calls:
        json.loads(call.function.arguments)
    with client.chat.completions.stream(**asked, logprobs=True) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in events
    for call, choice in zip(calls, final.choices, strict=True):
        assert choice.finish_reason == "tool_calls"
        (streamed,) = choice.message.tool_calls or []
        assert streamed.function.name == call.function.name
        assert streamed.function.arguments == call.function.arguments
        assert choice.logprobs is not None and choice.logprobs.content


def test_a_schema_that_is_none_names_the_tools(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": 5}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(openai.BadRequestError, match="invalid tools") as caught:
        client.chat.completions.create(
            messages=MESSAGES, tools=[tool], tool_choice="required", **LIMITS
        )
    assert caught.value.param == "tools"
    answer = client.chat.completions.create(
        messages=MESSAGES, tools=[tool], model="mock", max_tokens=4
    )
    assert answer.choices[0].message.tool_calls is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
