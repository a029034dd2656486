"""`strict` tools under tool_choice auto: free text, then bound arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_world import ChatWorld, body, function

from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.function_call_parser import DETECTORS, parse_calls
from sglang.srt.function_call.strict_calls import BOUND_CALLS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

STRICT = function("weather", strict=True)
LOOSE = function("now")
SCHEMA = STRICT["function"]["parameters"]


def sent(world: ChatWorld, asked: dict[str, Any], path: str) -> Any:
    assert world.ask(asked, path).status_code == 200
    (request,) = world.wire.generated()
    return request.sampling_params


@pytest.mark.parametrize("path", ["chat", "responses", "messages"])
def test_the_tag_of_each_api(path: str) -> None:
    flat = {"type": "function", **STRICT["function"]}
    named = {"name": "weather", "input_schema": SCHEMA, "strict": True}
    asked, url = {
        "chat": (body(STRICT, LOOSE), "/v1/chat/completions"),
        "responses": ({"input": "hi", "tools": [flat]}, "/v1/responses"),
        "messages": (body(max_tokens=5) | {"tools": [named]}, "/v1/messages"),
    }[path]
    world = ChatWorld("fine", tool_call_parser="hermes")
    tag = json.loads(sent(world, asked, url).structural_tag)
    assert tag["triggers"] == ["<tool_call>"]
    first, *others = tag["structures"]
    assert first["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
    assert first["schema"]["properties"] == SCHEMA["properties"]
    assert first["end"] == "}\n</tool_call>"
    assert [one["schema"] for one in others] == [{"type": "object"}] * len(others)


def test_nothing_is_bound_where_nobody_asked() -> None:
    for flags, asked in (
        ({"tool_call_parser": "hermes"}, body(LOOSE)),
        ({"tool_call_parser": "mistral"}, body(STRICT)),
        ({}, body(STRICT)),
        ({"tool_call_parser": "hermes"}, body(STRICT, tool_choice="none")),
    ):
        params = sent(ChatWorld("hi", **flags), asked, "/v1/chat/completions")
        assert params.grammar_key is None
    forced = body(STRICT, tool_choice="required")
    world = ChatWorld("[]", tool_call_parser="hermes")
    params = sent(world, forced, "/v1/chat/completions")
    assert params.structural_tag is None and params.json_schema is not None


def test_reasoning_before_a_bound_call_is_reasoning() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "a"}}\n</tool_call>'
    world = ChatWorld(
        f"<think>hm</think>{call}", tool_call_parser="qwen", reasoning_parser="qwen3"
    )
    message = world.ask(body(STRICT)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "a"}'


@pytest.mark.parametrize("parser", sorted(BOUND_CALLS))
def test_a_bound_call_is_one_for_the_parser(parser: str) -> None:
    form = BOUND_CALLS[parser]
    assert parser in DETECTORS and form.begin.startswith(form.trigger)
    text = form.begin.replace("{name}", "f") + '{"a": 1}' + form.end
    shown, (call,) = parse_calls(text, parser=parser, tools=[Tool(name="f")])
    assert (shown, call.name, json.loads(call.arguments)) == ("", "f", {"a": 1})


def test_structural_tag_of_a_client() -> None:
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    for asked in (body(response_format=tag), body(LOOSE, response_format=tag)):
        world = ChatWorld("hi", tool_call_parser="hermes")
        params = sent(world, asked, "/v1/chat/completions")
        assert json.loads(params.structural_tag) == tag
    asked = body(LOOSE, response_format=tag, tool_choice="required")
    assert ChatWorld().ask(asked).status_code == 400


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
