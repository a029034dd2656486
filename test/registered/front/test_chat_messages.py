"""Messages as templates of real models see them, and the prompts that these give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manager_world import FOLDER

from sglang.srt.managers.front.chat_messages import template_messages
from sglang.srt.managers.front.template_manager import TemplateManager
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

USER = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {
    "id": "abc123def",
    "type": "function",
    "index": 0,
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "abc123def", "content": "sunny"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}

# Differences between the families' templates; texts around them are left out.
LLAMA = """{% for m in messages %}
{%- if 'tool_calls' in m %}
{%- if not m.tool_calls|length == 1 %}{{ raise_exception("one call only") }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}
{%- elif m.role == 'tool' or m.role == 'ipython' %}
{%- if m.content is mapping or m.content is iterable %}<{{ m.content | tojson }}>
{%- else %}<{{ m.content }}>{% endif %}
{%- else %}{{ m.content | trim }};{% endif %}
{%- endfor %}"""
QWEN = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{%- if call.function %}{% set call = call.function %}{% endif %}
{{- '<tool_call>{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{ call.arguments }}
{%- else %}{{ call.arguments | tojson }}{% endif %}}</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
{%- else %}{{ m.content }};{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}>{% endif %}"""
MISTRAL = """{% for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}
{{- call.function | tojson | replace('}', ', "id": "' + call.id + '"}', 1) }}
{%- endfor %}]
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content | string }} {{ m.tool_call_id }}
{%- else %}{{ m.content }};{% endif %}
{%- endfor %}"""


def render(template: str, messages: list[Any], **fields: Any) -> str:
    tokenizer = load_tokenizer(FOLDER, chat_template=template)
    return TemplateManager(tokenizer).render(messages, variables={}, **fields)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (LLAMA, 'hi;{"name": "weather", "parameters": {"city": "Paris"}}<"sunny">'),
        (
            QWEN,
            'hi;<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}'
            "</tool_call><tool_response>sunny</tool_response>>",
        ),
        (
            MISTRAL,
            'hi;[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", '
            '"id": "abc123def"}}][TOOL_RESULTS] sunny abc123def',
        ),
    ],
)
def test_calls_and_their_results(template: str, prompt: str) -> None:
    assert render(template, [USER, ASKED, TOLD]) == prompt


def test_tools_and_reasoning_in_a_template() -> None:
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    text = render(QWEN, [USER, thought], tools=[TOOL])
    assert text == json.dumps(TOOL) + "hi;<think>Hm.</think>Yes.>"


def test_messages_as_they_are_given_to_a_template() -> None:
    other = {"id": "x", "function": {"name": "now", "arguments": "not JSON"}}
    third = {"function": {"name": "f", "arguments": {"a": 1}}}
    asked: dict[str, Any] = {"role": "assistant", "audio": None}
    asked["tool_calls"] = [CALL, other, third]
    asked |= {"annotations": [{}], "provider_specific_fields": {"refusal": None}}
    asked |= {"function_call": None, "name": None, "refusal": None}
    parts = [{"type": "text", "text": "it is "}, {"type": "text", "text": "5"}]
    told = {"role": "tool", "tool_call_id": "x", "content": parts, "name": "mine"}
    messages = template_messages([USER, asked, TOLD, told])
    assert messages[1]["content"] is None
    calls = messages[1]["tool_calls"]
    sent = [CALL["function"]["arguments"], "not JSON", {"a": 1}]
    assert [call["function"]["arguments"] for call in calls] == sent
    assert [call.get("id") for call in calls] == ["abc123def", "x", None]
    assert messages[2] == {**TOLD, "name": "weather"}
    assert messages[3] == {**told, "content": "it is 5"}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None}, None),
        ({}, None),
        ({"content": None, "tool_calls": []}, None),
        ({"content": None, "reasoning_content": "Hm."}, None),
        ({"content": None, "reasoning": "Hm."}, None),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "So.", "refusal": "No."}, "So."),
        ({"content": [{"type": "output_text", "text": "So."}]}, "So."),
    ],
)
def test_what_an_assistant_said(message: dict[str, Any], content: str | None) -> None:
    (plain,) = template_messages([{"role": "assistant", **message}])
    assert plain["content"] == content
    if message.get("reasoning_content") or message.get("reasoning"):
        assert plain["reasoning_content"] == "Hm."


def test_a_tool_may_have_nothing_to_say() -> None:
    contents: list[Any] = [None, "", []]
    for content in contents:
        (plain,) = template_messages([{**TOLD, "content": content}])
        assert plain["content"] == ""
    (plain,) = template_messages([{"role": "tool", "content": "x"}])
    assert plain == {"role": "tool", "content": "x"}


IMAGE_KINDS = ("image_url", "input_image", "image", "input_audio", "video_url", "file")


def test_fields_that_say_nothing_are_ignored() -> None:
    """Clients keep fields of their own in messages, and of other servers' answers."""
    extra = {"id": "m1", "timestamp": 5, "cache_control": {"type": "ephemeral"}}
    extra |= {"metadata": {"a": [1]}, "name": "Ann", "thinking_blocks": [{}]}
    plain = template_messages([{**USER, **extra}, {**TOLD, "status": "ok"}])
    assert plain == [USER, TOLD]


@pytest.mark.parametrize("field", ["audio", "function_call", "images", "tool_calls"])
def test_fields_that_say_something_are_refused_by_name(field: str) -> None:
    with pytest.raises(BadRequest, match=f"{field} is not supported") as refused:
        template_messages([{**USER, field: {"id": "x"}}])
    assert refused.value.param == f"messages[0].{field}"
    assert template_messages([{**USER, field: None}]) == [USER]


@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("role", ["user", "tool", "system", "assistant"])
def test_images_are_refused_by_name(role: str, kind: str) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "x"}}]
    with pytest.raises(BadRequest, match=f"of type '{kind}'; .* text parts only") as no:
        template_messages([{"role": role, "content": parts}])
    assert no.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "tool", "content": "x", "tool_call_id": 5},
            "messages[0].tool_call_id",
        ),
        ({"role": "tool", "content": {"a": 1}}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "content": 5}, "messages[0].content"),
        (
            {"role": "assistant", "content": None, "refusal": 5},
            "messages[0].refusal",
        ),
        (
            {"role": "user", "content": [{"type": "refusal", "refusal": "No."}]},
            "messages[0].content[0]",
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": 5},
            "messages[0].tool_calls",
        ),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"id": "x", "type": "custom"}]},
            "messages[0].tool_calls[0]",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]},
            "messages[0].tool_calls[0].id",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "x", "function": {}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": 5}}],
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": 5},
            "messages[0].reasoning_content",
        ),
        (
            {"role": "user", "content": "x", "tool_calls": [CALL]},
            "messages[0].tool_calls",
        ),
        ({"role": "x" * 10_000, "content": "x"}, "messages[0].role"),
    ],
)
def test_refusals_name_the_field(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        template_messages([message])
    assert caught.value.param == param and len(caught.value.message) < 300


TRIMMED = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"


@pytest.mark.parametrize("text", ["The answer", "The answer \n", " A", "</s>", ""])
def test_a_prompt_that_ends_within_the_last_message(text: str) -> None:
    last = {"role": "assistant", "content": text}
    prompt = render(TRIMMED, [USER, last], continue_final_message=True)
    assert prompt == f"[user] hi</s>[assistant] {text.lstrip()}"


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    last = {"role": "assistant", "content": "x"}
    with pytest.raises(BadRequest, match="does not show"):
        render("{{ messages[0].content }}", [USER, last], continue_final_message=True)
    for message in (USER, TOLD, ASKED):
        with pytest.raises(BadRequest, match="continue_final_message needs"):
            render(TRIMMED, [USER, message], continue_final_message=True)


def test_a_checkpoint_may_have_a_template_for_tools(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(FOLDER) / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools {{ tools[0].function.name }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def prompts(**options: Any) -> list[str]:
        manager = TemplateManager(load_tokenizer(str(tmp_path), **options))
        return [
            manager.render([USER], variables={}),
            manager.render([USER], variables={}, tools=[TOOL]),
        ]

    assert prompts() == ["plain", "tools weather"]
    assert prompts(chat_template="{{ 'mine' }}") == ["mine", "mine"]
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("file")
    (tmp_path / "chat_template.jinja").write_text("default file")
    assert prompts() == ["default file", "file"]


def test_options_of_tojson() -> None:
    template = (
        "{{ tools | tojson(indent=1) }}{{ tools | tojson(ensure_ascii=True) }}"
        "{{ {'b': 'é', 'a': [1]} | tojson(separators=(',', ':'), sort_keys=True) }}"
    )
    text = render(template, [USER], tools=[{"k": "é"}])
    assert text == '[\n {\n  "k": "é"\n }\n][{"k": "\\u00e9"}]{"a":[1],"b":"é"}'


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
