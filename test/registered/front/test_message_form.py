"""Messages in the form that a template wants: what published ones differ in.

Each template shows one mechanism; texts around it are left out.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from manager_world import FOLDER

from sglang.srt.managers.front.template_manager import TemplateManager
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

USER = {"role": "user", "content": "hi"}
ARGUMENTS = '{"city":"Paris"}'


def call(name: str = "weather", arguments: Any = ARGUMENTS) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "abc123def", "type": "function", "function": function}


ASKED = {"role": "assistant", "content": None, "tool_calls": [call()]}
TOLD = {"role": "tool", "tool_call_id": "abc123def", "content": "sunny"}

LOOP = "{% for m in messages %}BODY{% endfor %}"
# DeepSeek R1: a call is known by null, its arguments are added to a text.
NULL_IS_A_CALL = LOOP.replace(
    "BODY",
    "{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}[{{ c.function.name + c.function.arguments }}]"
    "{% endfor %}{% elif m.role == 'tool' %}<{{ m.content }}>"
    "{% else %}{{ m.role + ':' + m.content }};{% endif %}",
)
# Functionary 3.2: null is known, arguments are added to a text.
ADDED = LOOP.replace(
    "BODY",
    "{% if m.content is not none %}{{ m.content }};{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}"
    "{% endfor %}",
)
# An object that is written down as it is comes out in Python's notation.
WRITTEN = LOOP.replace(
    "BODY",
    "{{ m.content or '' }};"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}"
    "{% endfor %}",
)
# Qwen3-Coder: arguments are taken apart.
TAKEN_APART = LOOP.replace(
    "BODY",
    "{{ m.content or '' }};{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}({{ k }}={{ v }}){% endfor %}"
    "{% endfor %}",
)
# LFM2, GLM: null is written down.
NULL_IS_WRITTEN = LOOP.replace(
    "BODY",
    "{{ m.content if m.content is string else m.content | tojson }};"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}",
)
# Command R, some of Llama 4: content is a list of parts.
PARTS = LOOP.replace("BODY", "{% for part in m.content %}{{ part.text }}{% endfor %};")


def render(template: str, *messages: dict[str, Any], **fields: Any) -> str:
    given = copy.deepcopy(messages)
    tokenizer = load_tokenizer(FOLDER, chat_template=template)
    text = TemplateManager(tokenizer).render(messages, variables={}, **fields)
    assert messages == given
    return text


def test_a_template_may_show_calls_only_where_there_are_tools() -> None:
    template = "{% if tools %}TEMPLATE{% endif %}".replace("TEMPLATE", NULL_IS_A_CALL)
    tool = {"type": "function", "function": {"name": "weather"}}
    prompt = render(template, USER, ASKED, TOLD, tools=[tool])
    assert prompt == "user:hi;[weather" + ARGUMENTS + "]<sunny>"


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (NULL_IS_A_CALL, "user:hi;[weather" + ARGUMENTS + "]<sunny>"),
        (WRITTEN, "hi;;weather" + ARGUMENTS + "sunny;"),
        (TAKEN_APART, "hi;;weather(city=Paris)sunny;"),
        (
            NULL_IS_WRITTEN,
            'hi;;{"name": "weather", "arguments": {"city": "Paris"}}sunny;',
        ),
    ],
)
def test_a_call_without_text(template: str, content: Any, prompt: str) -> None:
    assert render(template, USER, {**ASKED, "content": content}, TOLD) == prompt


def test_content_that_is_null_stays_null_where_a_template_tests_for_it() -> None:
    assert render(ADDED, USER, ASKED, TOLD) == "hi;weather" + ARGUMENTS + "sunny;"
    empty = {**ASKED, "content": ""}
    assert render(ADDED, USER, empty, TOLD) == "hi;;weather" + ARGUMENTS + "sunny;"


@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'])
@pytest.mark.parametrize("template", [NULL_IS_A_CALL, ADDED, WRITTEN])
def test_an_object_is_text_where_a_template_wants_text(
    template: str, arguments: Any
) -> None:
    asked = {**ASKED, "tool_calls": [call(arguments=arguments)]}
    assert 'weather{"city": "Paris"}' in render(template, USER, asked, TOLD)


def test_a_call_beside_text_is_not_lost() -> None:
    """A template that looks at calls only where there is no text gets two messages."""
    asked = {**ASKED, "content": "Let me see.", "reasoning_content": "Hm."}
    prompt = "user:hi;assistant:Let me see.;[weather" + ARGUMENTS + "]<sunny>"
    assert render(NULL_IS_A_CALL, USER, asked, TOLD) == prompt
    assert "Let me see.;weather(city=Paris)" in render(TAKEN_APART, USER, asked, TOLD)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (WRITTEN, "hi;;hi;"),
        (ADDED, "hi;hi;"),
        (NULL_IS_WRITTEN, "hi;;hi;"),
        ("{% for m in messages %}{{ '|' + m.content }}{% endfor %}", "|hi||hi"),
        ("{% for m in messages %}|{{ m.content | trim }}{% endfor %}", "|hi||hi"),
        (PARTS, "hi;;hi;"),
    ],
)
def test_a_message_with_nothing_in_it(template: str, prompt: str) -> None:
    empty: list[dict[str, Any]] = [{}, {"tool_calls": []}, {"audio": None}]
    for fields in empty:
        said = {"role": "assistant", "content": None, **fields}
        assert render(template, USER, said, USER) == prompt


def test_a_template_may_refuse_an_empty_answer() -> None:
    """Ministral: an assistant's message has content or calls."""
    template = LOOP.replace(
        "BODY",
        "{% if not m.content %}{{ raise_exception('empty') }}{% endif %}"
        "{{ m.content }};",
    )
    contents: list[Any] = [None, "", []]
    for content in contents:
        said: dict[str, Any] = {"role": "assistant", "content": content}
        assert render(template, USER, said, USER) == "hi; ;hi;"


def test_a_template_that_reads_parts_gets_parts() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
    assert render(PARTS, USER, said, USER) == "hi;Yes.;hi;"
    backwards = LOOP.replace("BODY", "{{ m.content[::-1] }};")
    assert render(backwards, USER, said) == "ih;.seY;"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_comes_under_the_name_that_a_template_reads(name: str) -> None:
    template = LOOP.replace(
        "BODY", "{% if m.NAME %}<{{ m.NAME }}>{% endif %}{{ m.content }};"
    ).replace("NAME", name)
    for sent in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "Yes.", sent: "Hm."}
        assert render(template, USER, said, USER) == "hi;<Hm.>Yes.;hi;"


def test_reasoning_gives_way_where_a_template_refuses_it_beside_text_and_calls() -> (
    None
):
    """gpt-oss: a message has one analysis, the reasoning or the text of a call."""
    template = LOOP.replace(
        "BODY",
        "{% if m.tool_calls %}{% if m.content and m.thinking %}"
        "{{ raise_exception('not both') }}{% endif %}"
        "<{{ m.thinking or m.content }}>{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% else %}{{ m.content }};{% endif %}",
    )
    for content, shown in ((None, "<Hm.>weather"), ("So.", "<So.>weather")):
        asked = {**ASKED, "content": content, "reasoning_content": "Hm."}
        assert shown in render(template, USER, asked, TOLD)


def test_a_developer_is_the_system_where_a_template_does_not_know_the_role() -> None:
    told = {"role": "developer", "content": "Be terse."}
    template = LOOP.replace("BODY", "{{ m.role }}:{{ m.content }};")
    assert render(template, told, USER) == "system:Be terse.;user:hi;"
    template = '{% if messages[0].role == "developer" %}yes{% else %}no{% endif %}'
    assert render(template, told, USER) == "yes"


def test_a_template_that_shows_no_calls_is_left_alone() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    assert render(template, USER, ASKED, TOLD) == "user:hi;assistant:;tool:sunny;"


def test_documents_are_null_unless_they_are_sent() -> None:
    template = "{{ documents is defined }}{{ documents is none }}{{ tools is none }}"
    assert render(template, USER) == "TrueTrueTrue"


def test_arguments_that_are_no_object_stay_text() -> None:
    template = LOOP.replace(
        "BODY",
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments if c.function.arguments is string"
        " else c.function.arguments | tojson }}{% endfor %}",
    )
    for text in ("not JSON", "[1]", '{"a": ' * 5000):
        asked = {**ASKED, "tool_calls": [call(arguments=text)]}
        assert render(template, USER, asked, TOLD) == "weather" + text
    for nothing in (None, ""):
        asked = {**ASKED, "tool_calls": [call(arguments=nothing)]}
        assert render(template, USER, asked, TOLD) == "weather{}"


def test_arguments_that_are_cut_off_do_not_end_a_conversation() -> None:
    asked = {**ASKED, "tool_calls": [call(arguments='{"city": "Par')]}
    prompt = 'hi;;weather(arguments={"city": "Par)sunny;'
    assert render(TAKEN_APART, USER, asked, TOLD) == prompt


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
