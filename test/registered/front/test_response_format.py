"""`response_format` in every form that clients write: applied, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_world import ChatWorld, body, function

from sglang.srt.entrypoints.openai.response_format import response_schema
from sglang.srt.managers.messages.errors import BadRequest
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=2, suite="cpu")

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
HOLDER = {"name": "x", "schema": SCHEMA, "strict": True, "description": "d"}


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (None, None),
        ({}, None),
        ({"type": "text"}, None),
        ({"type": "text", "json_schema": None}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": None}, {"type": "object"}),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_object", "json_schema": HOLDER}, SCHEMA),
        ({"type": "json_object", "json_schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "json_schema": HOLDER}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, SCHEMA),
        ({"type": "json_schema", "json_schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", **HOLDER}, SCHEMA),
    ],
)
def test_the_schema_is_found(form: Any, schema: Any) -> None:
    found = response_schema(form)
    assert (None if found is None else json.loads(found)) == schema


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"schema": SCHEMA}, "response_format.type is None"),
        ({"type": "regex", "value": "a"}, "supported: text, json_object, json_schema"),
        ({"type": "JSON_OBJECT"}, "supported: text"),
        ({"type": "text", "schema": SCHEMA}, "'schema'; known: nothing beside type"),
        ({"type": "json_object", "pattern": "a"}, "unknown field 'pattern'"),
        ({"type": "json_object", "schema": "x"}, "response_format.schema must be"),
        ({"type": "json_schema"}, "response_format.json_schema.schema must be"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema must be"),
        ({"type": "json_schema", "json_schema": {}}, "schema must be"),
        ({"type": "json_schema", "json_schema": "{}"}, "schema must be"),
        ({"type": "json_schema", "json_schema": HOLDER | {"regex": "a"}},
         "response_format.json_schema has the unknown field 'regex'"),
        ({"type": "json_schema", "json_schema": HOLDER, "schema": SCHEMA}, "one of"),
        ({"type": "json_schema", "json_schema": HOLDER | {"strict": "yes"}},
         "response_format.json_schema.strict is 'yes'"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(form: Any, named: str) -> None:
    with pytest.raises(BadRequest) as caught:
        response_schema(form)
    assert named in caught.value.message
    assert (caught.value.param or "").startswith("response_format")


def test_every_api_applies_it_and_refuses_in_its_own_words() -> None:
    form = {"type": "json_object", "schema": SCHEMA}
    wrong = {"type": "json_object", "shape": SCHEMA}
    asked = {
        "/v1/chat/completions": body(),
        "/v1/completions": {"prompt": "hi", "max_tokens": 4},
        "/v1/responses": {"input": "hi"},
    }
    for path, request in asked.items():

        def with_format(form: Any, path: str = path) -> dict[str, Any]:
            if path == "/v1/responses":
                return {"text": {"format": form}}
            return {"response_format": form}

        world = ChatWorld("{}")
        assert world.ask(request | with_format(form), path).status_code == 200
        sent = world.wire.generated()[0].sampling_params.json_schema
        assert sent is not None and json.loads(sent) == SCHEMA
        answer = ChatWorld().ask(request | with_format(wrong), path)
        assert answer.status_code == 400, answer.text
        field = "text.format" if path == "/v1/responses" else "response_format"
        assert answer.json()["error"]["param"] == field
        known = "known: description, json_schema, name, schema, strict"
        assert f"{field} has the unknown field 'shape'; {known}" in answer.text
        answer = ChatWorld().ask(request | with_format({"type": "regex"}), path)
        assert "supported: text, json_object, json_schema" in answer.text


@pytest.mark.parametrize(
    "cut",
    range(len('[{"name": "weather", "parameters": ') + 1)[:: count(ci=5, full=1)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_that_is_cut_shows_nothing_of_the_list(
    cut: int, stream: bool
) -> None:
    text = '[{"name": "weather", "parameters": '[:cut] or " "
    if stream and cut % 5:
        return
    tool = function("weather")
    asked = body(tool, tool_choice="required", stream=stream)
    assert '"content":"[' not in ChatWorld(text).ask(asked).text.replace(": ", ":")
    flat = {"type": "function", **tool["function"]}
    asked = {"input": "hi", "tools": [flat], "tool_choice": "required"}
    answer = ChatWorld(text).ask(asked | {"stream": stream}, "/v1/responses").text
    assert '"name\\"' not in answer and '"[' not in answer
    named = {"name": "weather", "input_schema": tool["function"]["parameters"]}
    asked = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "tools": [named],
        "tool_choice": {"type": "any"},
        "stream": stream,
    }
    answer = ChatWorld(text).ask(asked, "/v1/messages").text
    assert '"name\\"' not in answer and '"text":"[' not in answer.replace(": ", ":")


def test_an_error_about_one_of_many_tools_names_it() -> None:
    tools = [function("ok"), function("login", parameters={"type": "object"})]
    world = ChatWorld("[]")
    world.ask(body(*tools, tool_choice="required"))
    schema = world.wire.generated()[0].sampling_params.json_schema
    assert schema is not None and set(json.loads(schema)["$defs"]) == {"ok", "login"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
