"""`/v1/messages` of Anthropic's API."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from blocks_world import replay_messages
from chat_world import ChatWorld

from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

PATH = "/v1/messages"
COUNT = PATH + "/count_tokens"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "looks", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
USER = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": USER}


def ask(world: ChatWorld, **fields: Any) -> dict[str, Any]:
    answer = world.ask(ASKED | fields, PATH)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def stream(world: ChatWorld, **fields: Any) -> list[dict[str, Any]]:
    """The events, each of which bears its type as its name."""
    answer = world.ask(ASKED | {"stream": True} | fields, PATH)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    shown = []
    for event in events:
        name, data = event.split("\n")
        shown.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {shown[-1]['type']}"
    return shown


def prompt_of(*messages: dict[str, Any], **fields: Any) -> str:
    world = ChatWorld("ok")
    ask(world, messages=list(messages), **fields)
    return world.prompt


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


BEGUN = "<|im_start|>assistant\n"


def test_a_whole_answer() -> None:
    world = ChatWorld("Hello there")
    answer = ask(
        world,
        model="any",
        system=[{"type": "text", "text": "be brief", "cache_control": {}}],
        temperature=0.5,
        top_k=3,
        metadata={"user_id": "u"},
        service_tier="auto",
    )
    assert answer.pop("id").startswith("msg_")
    usage = answer.pop("usage")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "any",
        "content": [{"type": "text", "text": "Hello there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["input_tokens"] == 1 and usage["output_tokens"] > 1
    assert usage["cache_read_input_tokens"] == 0
    (sent,) = world.wire.generated()
    assert (sent.sampling_params.top_k, sent.sampling_params.max_new_tokens) == (3, 50)
    assert world.prompt == turn("system", "be brief") + turn("user", "hi") + BEGUN


def test_thinking_and_calls() -> None:
    world = ChatWorld(f"{THOUGHT}I look.{CALL}", **PARSERS)
    answer = ask(world, tools=[TOOL])
    thinking, text, use = answer["content"]
    assert thinking["thinking"] == "hm" and thinking["signature"]
    assert text == {"type": "text", "text": "I look."}
    assert (use["name"], use["input"]) == ("weather", {"city": "Oslo"})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert '"parameters": {"type": "object"' in world.prompt
    # A client sends back what it got, and the results of the calls.
    result = {"type": "tool_result", "tool_use_id": use["id"]}
    prompt = prompt_of(
        *USER,
        {"role": "assistant", "content": answer["content"]},
        {
            "role": "user",
            "content": [
                result | {"content": [{"type": "text", "text": "7"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    )
    assert prompt.startswith(turn("user", "hi") + BEGUN + "I look.<tool_call>{")
    assert prompt.endswith(turn("tool", "7") + turn("user", "and?") + BEGUN)
    failed = {"role": "user", "content": [result | {"content": "x", "is_error": True}]}
    assert turn("tool", "Error: x") in prompt_of(*USER, failed)
    assert turn("tool", "") in prompt_of(*USER, {"role": "user", "content": [result]})


@pytest.mark.parametrize("step", [1, 5, 500])
def test_a_stream(step: int) -> None:
    output = f"{THOUGHT}I look.{CALL}"
    events = stream(ChatWorld(output, step=step, **PARSERS), tools=[TOOL])
    whole = ask(ChatWorld(output, **PARSERS), tools=[TOOL])
    start, delta = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == 1
    blocks = replay_messages(events)
    assert [b | {"id": 0} for b in blocks] == [b | {"id": 0} for b in whole["content"]]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == whole["usage"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "limit", "reason", "matched"),
    [
        (FinishReason(type="stop", matched="END"), 50, "stop_sequence", "END"),
        (FinishReason(type="stop", matched=2), 50, "end_turn", None),
        (FinishReason(type="length"), 1, "max_tokens", None),
        (FinishReason(type="length"), 9000, "model_context_window_exceeded", None),
    ],
)
def test_why_it_stopped(
    finish: FinishReason, limit: int, reason: str, matched: Any, is_stream: bool
) -> None:
    world = ChatWorld("Hello", finish=finish, step=99)
    asked: dict[str, Any] = {"max_tokens": limit, "stop_sequences": ["END"]}
    stop = stream(world, **asked)[-2]["delta"] if is_stream else ask(world, **asked)
    assert (stop["stop_reason"], stop["stop_sequence"]) == (reason, matched)
    (sent,) = world.wire.generated()
    assert list(sent.sampling_params.stop) == ["END"]


def test_the_last_message_of_the_assistant_goes_on() -> None:
    begun = {"role": "assistant", "content": "The answer is ("}
    assert prompt_of(*USER, begun) == turn("user", "hi") + BEGUN + "The answer is ("
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": " b "}]
    more = {"role": "assistant", "content": blocks}
    assert prompt_of(*USER, more).endswith(BEGUN + "a b ")
    empty = {"role": "assistant", "content": []}
    assert prompt_of(*USER, empty).endswith(BEGUN)


def test_messages_of_one_role_are_one_turn() -> None:
    said = {"role": "assistant", "content": "x"}
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = prompt_of(*USER, *USER, said, said, {"role": "user", "content": two})
    expected = (
        turn("user", "hi\n\nhi") + turn("assistant", "x\n\nx") + turn("user", "ab")
    )
    assert prompt == expected + BEGUN


def test_thinking_begins_a_turn() -> None:
    blocks = [
        block
        for text in ("x", "y")
        for block in (
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "text", "text": text},
        )
    ]
    prompt = prompt_of({"role": "assistant", "content": blocks}, *USER)
    expected = turn("assistant", "x") + turn("assistant", "y")
    assert prompt == expected + turn("user", "hi") + BEGUN


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ""),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "<think>\n"),
        ({"thinking": {"type": "adaptive"}}, "<think>\n"),
        ({"thinking": {"type": "disabled"}}, "<think>\n\n</think>\n\n"),
        (
            {
                "thinking": {"type": "disabled"},
                "chat_template_kwargs": {"enable_thinking": True},
            },
            "<think>\n",
        ),
    ],
)
def test_the_template_sees_whether_to_think(fields: dict[str, Any], end: str) -> None:
    assert prompt_of(*USER, **fields).endswith(BEGUN + end)


@pytest.mark.parametrize(
    ("choice", "names", "limit"),
    [
        ({"type": "any"}, ["weather", "f"], None),
        ({"type": "any", "disable_parallel_tool_use": True}, ["weather", "f"], 1),
        ({"type": "tool", "name": "f"}, ["f"], 1),
    ],
)
def test_the_choice_of_a_tool(choice: Any, names: list[str], limit: Any) -> None:
    world = ChatWorld(json.dumps([{"name": names[0], "parameters": {}}]))
    answer = ask(world, tools=[TOOL, TOOL | {"name": "f"}], tool_choice=choice)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert (answer["content"][0]["name"], answer["stop_reason"]) == (
        names[0],
        "tool_use",
    )
    (sent,) = world.wire.generated()
    schema = json.loads(sent.sampling_params.json_schema or "")
    entries = schema["items"].get("anyOf", [schema["items"]])
    assert [e["properties"]["name"]["const"] for e in entries] == names
    assert schema.get("maxItems") == limit


def test_no_tool_may_be_called() -> None:
    world = ChatWorld(CALL, **PARSERS)
    answer = ask(world, tools=[TOOL], tool_choice={"type": "none"})
    assert [block["type"] for block in answer["content"]] == ["text"]


def test_a_schema_of_the_output() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    config = {"format": form, "effort": "low"}
    for fields in ({"output_config": config}, {"output_format": form}):
        world = ChatWorld("{}")
        ask(world, **fields)
        (sent,) = world.wire.generated()
        assert json.loads(sent.sampling_params.json_schema or "") == SCHEMA


def test_tokens_are_counted() -> None:
    world = ChatWorld("ok")
    fields: dict[str, Any] = {"system": "s", "tools": [TOOL]}
    ask(world, **fields)
    counted = ChatWorld().ask({"messages": USER} | fields, COUNT)
    (sent,) = world.wire.generated()
    assert counted.json() == {"input_tokens": len(sent.input_ids)}


def content(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


RESULT = {"type": "tool_result", "tool_use_id": "t"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: expected `int`"),
    ({"max_tokens": -1}, "max_tokens must be at least 0"),
    ({"nonsense": 1}, "unknown field 'nonsense'; known fields: .*stop_sequences"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ({"messages": []}, "messages must not be empty"),
    ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role is 'rob"),
    ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content must be"),
    (content({"type": "image", "source": {}}), r"content\[0\] is of type 'image'"),
    (content({"type": "text", "text": "x", "a": 1}), r"unknown .*\[0\].a'; known fi"),
    (content(USE), r"content\[0\] is of type 'tool_use'"),
    (content(USE, role="assistant"), "must not hold tool_use"),
    (content(USE | {"input": "{}"}, role="assistant"), "input must be an object"),
    (content(RESULT | {"is_error": 1}), "is_error must be true or false"),
    (
        content(RESULT | {"content": [{"type": "image"}]}),
        r"content\[0\].content\[0\] is of type 'image'",
    ),
    (content({"type": "redacted_thinking", "data": "x"}, role="assistant"), "redacted"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema must be"),
    (
        {"tools": [TOOL | {"input_schema": {"type": "array"}}]},
        r"tools\[0\].input_schema must be the JSON schema of an object",
    ),
    ({"tools": [TOOL | {"defer_loading": True}]}, "defer_loading is not supported"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "none of the to"),
    ({"tool_choice": {"type": "required"}}, "tool_choice is of type 'required'"),
    ({"thinking": {"type": "between_tools"}}, "'between_tools'"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display is no"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format is of"),
    ({"output_format": {"type": "json"}}, "output_format is of"),
    ({"output_format": {}, "output_config": {"format": {}}}, "the same: send one"),
    ({"temperature": -1}, "temperature must be"),
    ({"stop_sequences": "x"}, "stop_sequences: expected `array"),
    ({"system": "x" * 50_000}, "prompt is too long: [0-9]+ tokens > 4095 "),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refusals_name_the_field(change: dict[str, Any], message: str) -> None:
    answer = ChatWorld(strict_fields=True).ask(ASKED | change, PATH)
    assert answer.status_code == 400, answer.text
    shown = answer.json()
    assert set(shown) == {"type", "error"} and shown["type"] == "error"
    assert set(shown["error"]) <= {"type", "message", "details"}
    assert shown["error"]["type"] == "invalid_request_error"
    assert re.search(message, shown["error"]["message"]), shown


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "m"}]
)
def test_clients_know_that_nothing_is_stored(thread: dict[str, Any]) -> None:
    """Anthropic's tool runner then sends the whole conversation."""
    answer = ChatWorld().ask(ASKED | {"thread": thread}, PATH)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "send the whole conversation in messages" in error["message"]


def test_errors_of_all_layers_have_the_shape() -> None:
    world = ChatWorld(api_key="k", strict_model_name=True)
    denied = world.ask(ASKED, PATH)
    assert denied.status_code == 401
    error = denied.json()["error"]
    assert error["type"] == "authentication_error"
    assert error["details"] == {"error_code": "invalid_api_key"}
    assert len(denied.content) == int(denied.headers["content-length"])
    # Other paths keep theirs.
    assert "code" in world.ask(ASKED, "/v1/chat/completions").json()["error"]
    world = ChatWorld(strict_model_name=True)
    for body, path, status, kind in (
        (ASKED | {"model": "other"}, PATH, 404, "not_found_error"),
        (ASKED, PATH + "/batches", 404, "not_found_error"),
        ({"x": ["," * 600_000]}, PATH, 413, "request_too_large"),
    ):
        answer = world.ask(body, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    world.wire.manager.set_draining()
    busy = world.ask(ASKED, PATH)
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
    assert busy.json()["error"]["type"] == "overloaded_error"
    assert world.ask(ASKED, PATH + "x").json()["error"]["code"] == 404


def test_a_stream_that_breaks_off() -> None:
    world = ChatWorld("some words and more of them")
    world.break_after = 1
    events = stream(world)
    assert events[0]["type"] == "message_start"
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")
    assert "error id" in events[-1]["error"]["message"]


def test_an_aborted_message_is_an_error() -> None:
    finish = FinishReason(type="abort", message="by the client", status_code=499)
    answer = ChatWorld("ab", finish=finish).ask(ASKED, PATH)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        499,
        "by the client",
    )
    assert stream(ChatWorld("some words", finish=finish))[-1]["type"] == "error"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
