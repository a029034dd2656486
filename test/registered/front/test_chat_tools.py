"""Tool calls and reasoning of `/v1/chat/completions`, through OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from chat_world import CHAT_TOKENIZER, ChatWorld, body, content_of, function

from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

LENGTH = FinishReason(type="length", length=9)
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
LIST = '[{"name": "weather", "parameters": %s}, {"name": "now", "parameters": {}}]'
TOOLS = (function("weather"), function("now", parameters=None))


def chat(world: ChatWorld, asked: dict[str, Any]) -> Any:
    async def call(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(model="m", **asked)

    return world.openai(call)


def stream(world: ChatWorld, asked: dict[str, Any]) -> list[Any]:
    async def call(client: openai.AsyncOpenAI) -> list[Any]:
        chunks = await client.chat.completions.create(model="m", stream=True, **asked)
        return [chunk async for chunk in chunks]

    found: list[Any] = world.openai(call)
    return found


def test_calls_of_a_whole_answer() -> None:
    world = ChatWorld(f"I look.\n{CALL}\n{NOW}", tool_call_parser="qwen25")
    (choice,) = chat(world, body(*TOOLS)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "weather")
    assert first.function.arguments == ARGUMENTS and second.function.name == "now"
    assert first.id != second.id
    assert world.prompt.startswith('{"type": "function", "function": {"name": "weath')


ANSWER = {"type": "object", "properties": {"warm": {"type": "boolean"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}


def test_an_answer_with_a_schema_leaves_room_for_calls() -> None:
    """Agents whose last answer has a type send both in every turn."""
    # Bound from the beginning on, an output has no reasoning.
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek-r1"}
    world = ChatWorld(CALL, '{"warm": true}', **parsers)
    asked = body(*TOOLS, response_format=FORM, n=2)
    called, answered = chat(world, asked).choices
    assert called.message.tool_calls[0].function.name == "weather"
    assert answered.message.content == '{"warm": true}'
    sent, *_ = world.wire.generated()
    tag = json.loads(sent.sampling_params.structural_tag or "")
    assert tag["answer_schema"] == ANSWER
    assert [one["name"] for one in tag["structures"]] == ["weather", "now"]


@pytest.mark.parametrize("parser", [None, "hermes", "mistral"])
def test_a_forced_call_has_no_text_to_format(parser: str | None) -> None:
    world = ChatWorld(LIST % ARGUMENTS, tool_call_parser=parser)
    asked = body(*TOOLS, tool_choice="required")
    chat(world, asked | {"response_format": FORM})
    (sent,) = world.wire.generated()
    alone = ChatWorld(LIST % ARGUMENTS, tool_call_parser=parser)
    chat(alone, asked)
    (expected,) = alone.wire.generated()
    assert sent.sampling_params == expected.sampling_params


def test_the_shape_of_a_streamed_call() -> None:
    for step in (1, 3, 100):
        world = ChatWorld(f"I look.\n{CALL}{NOW}", step=step, tool_call_parser="hermes")
        chunks = stream(world, body(*TOOLS))
        assert content_of(chunks) == "I look."
        deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or []]
        for index, name, arguments in ((0, "weather", ARGUMENTS), (1, "now", "{}")):
            first, *rest = [delta for delta in deltas if delta.index == index]
            assert first.id.startswith("call_") and first.type == "function"
            assert (first.function.name, first.function.arguments) == (name, "")
            assert "".join(d.function.arguments for d in rest) == arguments
            for delta in rest:
                assert delta.model_dump(exclude_unset=True) == {
                    "index": index,
                    "function": {"arguments": delta.function.arguments},
                }
        reasons = [c.choices[0].finish_reason for c in chunks]
        assert reasons[-1] == "tool_calls" and not any(reasons[:-1])
        assert chunks[0].choices[0].delta.role == "assistant"


def test_every_choice_has_calls_of_its_own() -> None:
    world = ChatWorld(CALL, "no call", NOW, tool_call_parser="qwen25")
    one, two, three = chat(world, body(*TOOLS, n=3)).choices
    assert one.message.tool_calls[0].function.name == "weather"
    assert two.message.content == "no call" and not two.message.tool_calls
    assert three.message.tool_calls[0].function.name == "now"
    reasons = [choice.finish_reason for choice in (one, two, three)]
    assert reasons == ["tool_calls", "stop", "tool_calls"]
    world = ChatWorld(CALL, "no call", NOW, tool_call_parser="qwen25")
    chunks = stream(world, body(*TOOLS, n=3))
    calls = {
        choice.index: delta.function.name
        for chunk in chunks
        for choice in chunk.choices
        for delta in choice.delta.tool_calls or []
        if delta.function.name
    }
    assert calls == {0: "weather", 2: "now"} and content_of(chunks) == "no call"


def test_a_call_that_is_cut_off() -> None:
    world = ChatWorld(CALL[:60], finish=LENGTH, tool_call_parser="qwen25")
    (choice,) = chat(world, body(*TOOLS)).choices
    assert choice.finish_reason == "length"
    arguments = choice.message.tool_calls[0].function.arguments
    assert arguments and ARGUMENTS.startswith(arguments)


def test_without_a_parser_a_call_is_text() -> None:
    world = ChatWorld(CALL)
    (choice,) = chat(world, body(*TOOLS, tool_choice="auto")).choices
    assert choice.message.content == CALL and choice.finish_reason == "stop"
    assert "weather" in world.prompt


def test_no_call_is_looked_for_where_none_may_be() -> None:
    world = ChatWorld(CALL, tool_call_parser="qwen25")
    (choice,) = chat(world, body(*TOOLS, tool_choice="none")).choices
    assert choice.message.content == CALL and not choice.message.tool_calls
    assert "weather" not in world.prompt
    world = ChatWorld(CALL, tool_call_parser="qwen25")
    assert chat(world, body()).choices[0].message.content == CALL


def schema_of(world: ChatWorld) -> Any:
    (request,) = world.wire.generated()
    assert request.sampling_params.json_schema is not None
    return json.loads(request.sampling_params.json_schema)


@pytest.mark.parametrize("parser", [None, "llama3"])
def test_a_required_call(parser: str | None) -> None:
    text = LIST % ARGUMENTS
    world = ChatWorld(text, tool_call_parser=parser)
    asked = body(*TOOLS, tool_choice="required")
    (choice,) = chat(world, asked).choices
    calls = [call.function for call in choice.message.tool_calls]
    assert [call.name for call in calls] == ["weather", "now"]
    assert calls[0].arguments == ARGUMENTS and choice.message.content is None
    assert choice.finish_reason == "tool_calls"
    schema = schema_of(world)
    assert "maxItems" not in schema and len(schema["items"]["anyOf"]) == 2
    chunks = stream(ChatWorld(text), asked)
    deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or []]
    assert [d.function.name for d in deltas if d.function.name] == ["weather", "now"]
    assert content_of(chunks) == ""


NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": NAMED}, ["now"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "now"]),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [NAMED]},
                },
                "parallel_tool_calls": False,
            },
            ["now"],
        ),
    ],
)
def test_exactly_one_call(fields: dict[str, Any], names: list[str]) -> None:
    world = ChatWorld('[{"name": "now", "parameters": {}}]')
    (choice,) = chat(world, body(*TOOLS, **fields)).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    schema = schema_of(world)
    calls = schema["items"].get("anyOf", [schema["items"]])
    assert [call["properties"]["name"]["const"] for call in calls] == names
    assert schema["maxItems"] == schema["minItems"] == 1


def test_at_most_one_call_where_the_model_is_free() -> None:
    world = ChatWorld(CALL + NOW, tool_call_parser="qwen25")
    (choice,) = chat(world, body(*TOOLS, parallel_tool_calls=False)).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"


def test_only_allowed_tools_are_called() -> None:
    world = ChatWorld(CALL + NOW, tool_call_parser="qwen25")
    allowed = {"mode": "auto", "tools": [NAMED]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    (answer,) = chat(world, body(*TOOLS, tool_choice=choice)).choices
    assert [call.function.name for call in answer.message.tool_calls] == ["now"]
    assert answer.message.content == CALL and '"weather"' in world.prompt


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_of_all_tokens(is_stream: bool) -> None:
    world = ChatWorld(f"Ok {CALL}", tool_call_parser="qwen25")
    asked = body(*TOOLS, logprobs=True)
    answers = stream(world, asked) if is_stream else [chat(world, asked)]
    shown = [
        entry.token
        for answer in answers
        if (logprobs := answer.choices[0].logprobs) is not None
        for entry in logprobs.content
    ]
    assert "".join(shown) == f"Ok {CALL}"


def test_special_tokens_that_are_marks_stay_in_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = ChatWorld(CALL, tool_call_parser="qwen25")
    chat(world, body(*TOOLS))
    (request,) = world.wire.generated()
    assert request.sampling_params.skip_special_tokens
    special = CHAT_TOKENIZER.special_texts
    assert special and "<tool_call>" not in special
    monkeypatch.setattr(CHAT_TOKENIZER, "special_texts", special | {"<tool_call>"})
    world.wire.sent.clear()
    chat(world, body(*TOOLS))
    (request,) = world.wire.generated()
    assert not request.sampling_params.skip_special_tokens


REASONED = f"<think>\nHm, {NOW}.\n</think>\n\nI look.{CALL}"


def test_reasoning_then_calls() -> None:
    flags: dict[str, Any] = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
    (choice,) = chat(ChatWorld(REASONED, **flags), body(*TOOLS)).choices
    message = choice.message
    assert message.reasoning_content == f"Hm, {NOW}." and message.content == "I look."
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    chunks = stream(ChatWorld(REASONED, **flags), body(*TOOLS))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [
        fields["reasoning_content"]
        for fields in (delta.model_dump() for delta in deltas)
        if fields.get("reasoning_content")
    ]
    assert "".join(thoughts) == f"Hm, {NOW}." and len(thoughts) > 3
    assert content_of(chunks) == "I look."


def test_reasoning_by_request() -> None:
    text = "<think>Hm.</think>Yes."

    def ask(**fields: Any) -> dict[str, Any]:
        world = ChatWorld(text, reasoning_parser="qwen3")
        answer = world.ask(body(**fields)).json()
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    assert ask()["reasoning_content"] == "Hm." and ask()["content"] == "Yes."
    kept = ask(separate_reasoning=False)
    assert kept["content"] == text and kept["reasoning_content"] is None
    world = ChatWorld(text, reasoning_parser="qwen3")
    chunks = stream(world, body(extra_body={"stream_reasoning": False}))
    thoughts = [
        c.choices[0].delta.model_dump().get("reasoning_content") for c in chunks
    ]
    assert [thought for thought in thoughts if thought] == ["Hm."]


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (True, "Hm.</think>Yes.", "Hm.", "Yes."),
        (False, "Yes.", None, "Yes."),
        (None, "Hm.</think>Yes.", "Hm.", "Yes."),
    ],
)
def test_the_template_opens_or_closes_the_reasoning(
    thinking: bool | None, text: str, reasoning: str | None, content: str
) -> None:
    world = ChatWorld(text, reasoning_parser="deepseek-r1")
    variables = {} if thinking is None else {"enable_thinking": thinking}
    answer = world.ask(body(chat_template_kwargs=variables)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)


def test_a_constrained_output_has_no_reasoning() -> None:
    world = ChatWorld('{"a": 1}', reasoning_parser="deepseek-r1")
    answer = world.ask(body(response_format={"type": "json_object"})).json()
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'


def test_a_continued_message() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "The answer \n"},
    ]
    world = ChatWorld("is 5.", reasoning_parser="deepseek-r1")
    answer = world.ask(body(messages=messages, continue_final_message=True)).json()
    assert world.prompt.endswith("<|im_start|>assistant\nThe answer \n")
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "is 5.")
    messages[1]["content"] = "<think>I"
    world = ChatWorld(" say</think>5", reasoning_parser="deepseek-r1")
    answer = world.ask(body(messages=messages, continue_final_message=True)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("say", "5")


def test_without_a_generation_prompt() -> None:
    world = ChatWorld("Yes.")
    world.ask(body(add_generation_prompt=False))
    assert world.prompt.endswith("hi<|im_end|>\n")


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(70):
    DEEP = {"type": "object", "properties": DEEP}
ONE = function("f")
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [5]}, "expected `object`", "tools[0]"),
    ({"tools": [{"type": "custom"}]}, "type is 'custom'", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "must be an object", "tools[0].function"),
    ({"tools": [function("a b")]}, "1 to 64 letters", "tools[0].function.name"),
    ({"tools": [function("f" * 65)]}, "1 to 64 letters", "tools[0].function.name"),
    ({"tools": [ONE, ONE]}, "must be unique", "tools[1].function.name"),
    (
        {"tools": [function("f", parameters={"type": "string"})]},
        "schema of an object",
        "tools[0].function.parameters",
    ),
    (
        {"tools": [function("f", parameters=DEEP)]},
        "more than 64 levels",
        "tools[0].function.parameters",
    ),
    (
        {"tools": [function("f", strict="yes")]},
        "must be a boolean",
        "tools[0].function.strict",
    ),
    (
        {"tools": [function("f", description=5)]},
        "must be a string",
        "tools[0].function.description",
    ),
    ({"tools": [function(f"f{i}") for i in range(513)]}, "at most 512", "tools"),
    (
        {"tools": [function("f", description="x" * (1 << 20))]},
        "at most 1048576 are accepted",
        "tools",
    ),
    ({"tools": [ONE], "tool_choice": "any"}, "tool_choice is 'any'", "tool_choice"),
    ({"tools": [ONE], "tool_choice": NAMED}, "names 'now'", "tool_choice"),
    (
        {"tools": [ONE], "tool_choice": {"type": "function"}},
        "must name a function",
        "tool_choice",
    ),
    (
        {"tools": [ONE], "tool_choice": {"type": "allowed_tools"}},
        "mode and a list of tools",
        "tool_choice.allowed_tools",
    ),
    ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
    (
        {"tools": [ONE], "parallel_tool_calls": "x"},
        "expected `bool",
        "parallel_tool_calls",
    ),
    (
        {"tools": [ONE], "response_format": {"type": "json_object"}},
        "cannot be combined with tools",
        "response_format",
    ),
    (
        {"tools": [ONE], "response_format": {"type": "x"}},
        "response_format.type is 'x'",
        "response_format.type",
    ),
    (
        {"tools": [ONE], "tool_choice": "required", "regex": "a"},
        "cannot be combined with tools",
        "regex",
    ),
    ({"tools": [ONE], "ebnf": "root ::= 'a'"}, "cannot be combined", "ebnf"),
    ({"tools": [ONE], "json_schema": {}}, "cannot be combined", "json_schema"),
    ({"functions": [{"name": "f"}]}, "functions is not supported", "functions"),
    (
        {"continue_final_message": True},
        "last message of the assistant",
        "continue_final_message",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "cannot be combined",
        "continue_final_message",
    ),
]


@pytest.mark.parametrize(("change", "message", "param"), REFUSED)
def test_refusals_name_the_field(
    change: dict[str, Any], message: str, param: str
) -> None:
    answer = ChatWorld().ask(body(**change))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and error["param"] == param, error
    assert len(error["message"]) < 400


def test_a_response_format_goes_with_tools_that_may_not_be_called() -> None:
    world = ChatWorld("{}")
    asked = body(ONE, tool_choice="none", response_format={"type": "json_object"})
    assert world.ask(asked).json()["choices"][0]["message"]["content"] == "{}"


def test_parse_function_call() -> None:
    world = ChatWorld(tool_call_parser="qwen25")
    asked = {"text": f"Ok. {CALL}", "tools": list(TOOLS)}
    found = world.ask(asked, "/parse_function_call").json()
    call = {"tool_index": 0, "name": "weather", "parameters": ARGUMENTS}
    assert found == {"normal_text": "Ok.", "calls": [call]}
    asked |= {"text": "[now()]", "tool_call_parser": "pythonic"}
    found = world.ask(asked, "/parse_function_call").json()
    assert found["calls"] == [{"tool_index": 0, "name": "now", "parameters": "{}"}]


def test_separate_reasoning() -> None:
    asked = {"text": "<think>Hm.</think>Yes.", "reasoning_parser": "qwen3"}
    found = ChatWorld().ask(asked, "/separate_reasoning").json()
    assert found == {"reasoning_text": "Hm.", "text": "Yes."}


@pytest.mark.parametrize(
    ("path", "asked", "message"),
    [
        ("/parse_function_call", {"text": "x"}, "tool_call_parser is missing"),
        (
            "/separate_reasoning",
            {"text": "x", "reasoning_parser": "no"},
            "reasoning_parser is 'no'; supported: deepseek-r1",
        ),
        (
            "/separate_reasoning",
            {"text": "x" * 300_000, "reasoning_parser": "qwen3"},
            "at most 262144",
        ),
    ],
)
def test_parse_routes_refuse(path: str, asked: dict[str, Any], message: str) -> None:
    answer = ChatWorld().ask(asked, path)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
