"""`/v1/responses` through OpenAI's client."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pydantic
import pytest
from chat_world import ChatWorld

from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
LOGPROBS = "message.output_text.logprobs"


def create(world: ChatWorld, **asked: Any) -> Any:
    async def call(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.create(**({"model": "m", "input": "hi"} | asked))

    return world.openai(call)


def prompt_of(given: Any, **fields: Any) -> str:
    world = ChatWorld("ok")
    create(world, input=given, **fields)
    return world.prompt


def test_a_whole_answer() -> None:
    world = ChatWorld("Hello there", enable_cache_report=True)
    answer = create(
        world,
        model="any",
        instructions="be brief",
        temperature=0.5,
        max_output_tokens=20,
        metadata={"a": "b"},
        extra_body={"store": True, "user": "u", "top_k": 3},
    )
    assert answer.output_text == "Hello there" and answer.id.startswith("resp_")
    assert (answer.status, answer.model) == ("completed", "any")
    assert answer.metadata == {"a": "b"} and answer.completed_at is not None
    assert (answer.temperature, answer.max_output_tokens) == (0.5, 20)
    assert answer.instructions == "be brief" and answer.to_dict()["store"] is False
    (message,) = answer.output
    assert (message.type, message.status, message.role) == (
        "message",
        "completed",
        "assistant",
    )
    assert message.content[0].annotations == []
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    (sent,) = world.wire.generated()
    assert (sent.sampling_params.top_k, sent.sampling_params.max_new_tokens) == (3, 20)
    assert world.prompt == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_reasoning_and_calls() -> None:
    world = ChatWorld(f"{THOUGHT}I look.{CALL}", **PARSERS)
    answer = create(world, tools=[TOOL], tool_choice="auto")
    reasoning, message, call = answer.output
    assert reasoning.type == "reasoning" and reasoning.summary == []
    assert reasoning.content[0].text == "hm"
    assert message.content[0].text == "I look."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert call.call_id != call.id and call.status == "completed"
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.tools[0].name == "weather"
    assert '{"type": "function", "function": {"name": "weather"' in world.prompt
    # A client sends back what it got, and the result of the call.
    output = [item.model_dump(exclude_none=True) for item in answer.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    again = ChatWorld("ok", **PARSERS)
    create(again, input=[{"role": "user", "content": "hi"}, *output, result])
    assert again.prompt.startswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI look.<tool_call>"
    )
    assert '"city": "Oslo"' in again.prompt
    assert "<|im_start|>tool\n7<|im_end|>" in again.prompt


@pytest.mark.parametrize("step", [1, 5, 500])
def test_a_stream(step: int) -> None:
    world = ChatWorld(f"{THOUGHT}I look.{CALL}", step=step, **PARSERS)

    async def call(client: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
        async with client.responses.stream(
            model="m",
            input="hi",
            tools=[TOOL],  # type: ignore[list-item]
        ) as stream:
            events = [event async for event in stream]
            return events, await stream.get_final_response()

    events, final = world.openai(call)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = {
        kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    }
    assert texts["reasoning_text"] == "hm" and texts["output_text"] == "I look."
    assert json.loads(texts["function_call_arguments"]) == {"city": "Oslo"}
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
    ]
    assert final.output[2].parsed_arguments == {"city": "Oslo"}
    assert final.status == "completed" and final.output_text == "I look."


def test_the_wire_of_a_stream() -> None:
    answer = ChatWorld("ab", step=9).ask({"input": "hi", "stream": True}, PATH)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    names = []
    for event in events:
        name, data = event.split("\n")
        names.append(name.removeprefix("event: response."))
        assert json.loads(data.removeprefix("data: "))["type"] == name[7:]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


class City(pydantic.BaseModel):
    city: str


def test_a_parsed_text() -> None:
    world = ChatWorld('{"city": "Oslo"}', **PARSERS)

    async def call(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.parse(model="m", input="hi", text_format=City)

    assert world.openai(call).output_parsed == City(city="Oslo")
    (sent,) = world.wire.generated()
    assert json.loads(sent.sampling_params.json_schema or "")["title"] == "City"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        (FinishReason(type="length"), "incomplete", {"reason": "max_output_tokens"}),
        (FinishReason(type="abort", status_code=499), "cancelled", None),
    ],
)
def test_an_output_that_is_cut(
    finish: FinishReason, status: str, details: Any, is_stream: bool
) -> None:
    world = ChatWorld("abc", finish=finish)
    answer = world.ask({"input": "hi", "stream": is_stream}, PATH)
    if is_stream:
        name, data = answer.text.strip().split("\n\n")[-1].split("\n")
        assert name == "event: response.incomplete"
        shown = json.loads(data.removeprefix("data: "))["response"]
    else:
        shown = answer.json()
    assert (shown["status"], shown["incomplete_details"]) == (status, details)
    assert shown["output"][0]["status"] == "incomplete"


def test_a_stream_that_breaks_off() -> None:
    world = ChatWorld("some words and more of them")
    world.break_after = 1
    answer = world.ask({"input": "hi", "stream": True}, PATH)
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    assert (answer.status_code, name) == (200, "event: response.failed")
    shown = json.loads(data.removeprefix("data: "))["response"]
    assert (shown["status"], shown["usage"]) == ("failed", None)
    assert shown["error"]["code"] == "server_error"
    assert "error id" in shown["error"]["message"]


def test_logprobs() -> None:
    asked = {"include": [LOGPROBS], "top_logprobs": 0}
    answer = create(ChatWorld("ab", step=1), **asked)
    (part,) = answer.output[0].content
    assert len(part.logprobs) == answer.usage.output_tokens
    assert bytes(part.logprobs[0].bytes).decode() == part.logprobs[0].token
    plain = create(ChatWorld("ab"), include=["reasoning.encrypted_content"])
    assert plain.output[0].content[0].logprobs == []


USER = "<|im_start|>user\n{}<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n{}<|im_end|>\n"
ITEMS: list[tuple[list[Any], str]] = [
    (
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 2}],
        USER.format("aa"),
    ),
    (
        [{"type": "message", "role": "developer", "content": "d", "status": None}],
        "<|im_start|>system\nd<|im_end|>\n",
    ),
    (
        [
            {"role": "assistant", "content": "one"},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "two", "annotations": []}],
            },
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": "x"},
        ],
        "".join(map(ASSISTANT.format, ("one", "two", "No."))) + USER.format("x"),
    ),
    (
        # Reasoning begins a turn; a template without a place for it leaves it out.
        [
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "s"}],
            },
            {"role": "assistant", "content": "said"},
            {"role": "user", "content": "x"},
        ],
        ASSISTANT.format("said") + USER.format("x"),
    ),
]


@pytest.mark.parametrize(("items", "prompt"), ITEMS)
def test_items_in_the_prompt(items: list[Any], prompt: str) -> None:
    assert prompt_of(items) == prompt + "<|im_start|>assistant\n"


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


FUNCTION = {"type": "function", "name": "f"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "r"}, "previous_response_id", "whole conversation"),
    ({"conversation": "c"}, "conversation", "whole conversation"),
    ({"background": True}, "background", "nothing is stored"),
    ({"prompt": {"id": "p"}}, "prompt", "no prompts are stored"),
    ({"truncation": "middle"}, "truncation", "known values: auto, disabled"),
    ({"include": ["x"]}, "include", "known values: message.output_text"),
    ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"metadata": {"a": 1}}, "metadata", "values are strings"),
    ({"nonsense": 1}, "nonsense", "known fields: .*max_output_tokens"),
    ({"input": []}, "input", "must not be empty"),
    (item(type="item_reference", id="x"), "input[0].type", "reads message"),
    (item(role="tool", content="x"), "input[0].role", "supported: system, dev"),
    (item(role="user", content=3), "input[0].content", "must be a list"),
    (item(role="user", content="x", a=1), "input[0].a", "known fields: type, role"),
    (
        item(role="user", content=[{"type": "input_image", "image_url": "x"}]),
        "input[0].content[0].type",
        "'input_image'",
    ),
    (
        item(type="reasoning", summary=[], encrypted_content="x"),
        "input[0].encrypted_content",
        "not supported",
    ),
    (item(type="function_call", call_id="c", name="f"), "input[0].arguments", "string"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    (
        {"tools": [FUNCTION | {"parameters": {"type": "array"}}]},
        "tools[0].parameters",
        "schema of an object",
    ),
    ({"tools": [FUNCTION | {"name": "a b"}]}, "tools[0].name", "letters"),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice",
        "none of the tools",
    ),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "'mcp'"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type is"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format",
        "text.format.schema must be",
    ),
    (
        {"tools": [FUNCTION], "text": {"format": {"type": "json_object"}}},
        "text.format",
        "text.format cannot be combined with tools",
    ),
    ({"temperature": -1}, "temperature", "temperature must be"),
    ({"reasoning": {"depth": 1}}, "reasoning.depth", "known fields: effort"),
    ({"input": "x" * 50_000}, "input", "the input .* is longer than"),
]


@pytest.mark.parametrize(("change", "param", "message"), REFUSED)
def test_refusals_name_the_field(
    change: dict[str, Any], param: str, message: str
) -> None:
    answer = ChatWorld(strict_fields=True).ask({"input": "hi"} | change, PATH)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param, error
    assert re.search(message, error["message"]), error


def test_logprobs_are_refused_beside_tools() -> None:
    asked = {"input": "hi", "include": [LOGPROBS], "tools": [FUNCTION]}
    world = ChatWorld(tool_call_parser="hermes")
    assert world.ask(asked, PATH).json()["error"]["param"] == "include"


def test_nothing_is_stored() -> None:
    async def call(client: openai.AsyncOpenAI) -> list[str]:
        found = []
        responses = client.responses
        for ask in (
            lambda: responses.retrieve("resp_1"),
            lambda: responses.delete("resp_1"),
            lambda: responses.cancel("resp_1"),
            lambda: responses.input_items.list("resp_1")._get_page(),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                await ask()
            found.append(str(caught.value))
        return found

    assert all("stores no responses" in error for error in ChatWorld().openai(call))


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["f", "g"]),
        ({"type": "function", "name": "g"}, ["g"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]},
            ["f"],
        ),
    ],
)
def test_the_choice_of_a_tool(choice: Any, names: list[str]) -> None:
    world = ChatWorld(json.dumps([{"name": names[0], "parameters": {}}]))
    tools = [FUNCTION, FUNCTION | {"name": "g"}]
    answer = create(world, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.output
    assert (call.type, call.name, call.arguments) == ("function_call", names[0], "{}")
    (sent,) = world.wire.generated()
    schema = json.loads(sent.sampling_params.json_schema or "")
    entries = schema["items"].get("anyOf", [schema["items"]])
    assert [e["properties"]["name"]["const"] for e in entries] == names
    assert schema["maxItems"] == 1
    assert answer.parallel_tool_calls is False


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
