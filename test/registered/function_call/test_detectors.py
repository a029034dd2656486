"""Tool calls in the formats of models: whole texts, and any fragmentation of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.function_call.base_detector import CallFormat
from sglang.srt.function_call.call_formats import JSON_ARRAY
from sglang.srt.function_call.core_types import CallDelta, Tool
from sglang.srt.function_call.function_call_parser import (
    DETECTORS,
    collect_calls,
    parse_calls,
)
from sglang.srt.utils.text_source import MAX_ATTEMPT_CHARS, Read, TextSource
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

TOOLS = [
    Tool(
        name="weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "all": {"type": "boolean"},
            },
        },
    ),
    Tool(name="now"),
]
ALL = DETECTORS | {"array": JSON_ARRAY}
Result = tuple[str, list[tuple[str, str]]]
PARIS = '{"city": "Paris"}'


def parse(
    kind: CallFormat,
    pieces: Sequence[str],
    tools: Sequence[Tool] = TOOLS,
    max_calls: int | None = None,
) -> Result:
    """Text and calls; checks the order of the pieces of each call."""
    detector = kind(tools, max_calls=max_calls)
    out = [found for piece in pieces for found in detector.push(piece)]
    out += detector.finish()
    deltas = [delta for delta in out if isinstance(delta, CallDelta)]
    named = [delta for delta in deltas if delta.name is not None]
    assert [delta.index for delta in named] == list(range(len(named)))
    assert all(delta.call_id and not delta.arguments for delta in named)
    assert [delta.index for delta in deltas] == sorted(d.index for d in deltas)
    calls = [(call.name, call.arguments) for call in collect_calls(deltas)]
    return "".join(piece for piece in out if isinstance(piece, str)), calls


DS_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
DS_END = "\n```<｜tool▁call▁end｜>"
WEATHER, NOW = ("weather", PARIS), ("now", "{}")
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # Hermes, Qwen 2.5
    (
        "qwen25",
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}'
        '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Let me see.",
        [WEATHER, NOW],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}', "", [NOW]),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris"}, "id": [1], "name": "weather"}',
        "",
        [WEATHER],
    ),
    (
        "hermes",  # JSON in a string, as the API has it
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}',
        "",
        [WEATHER],
    ),
    (
        "hermes",  # marks and brackets within a string
        '<tool_call>{"name": "weather", "arguments": {"city": "}</tool_call>\\""}}',
        "",
        [("weather", '{"city": "}</tool_call>\\""}')],
    ),
    (
        "hermes",  # a bracket is missing
        '<tool_call>{"name": "weather", "arguments": {"city": {"a": 1}\n</tool_call>ok',
        "ok",
        [("weather", '{"city": {"a": 1}\n}')],
    ),
    (
        "hermes",  # the length ended it
        '<tool_call>{"name": "weather", "arguments": {"city": "Pa',
        "",
        [("weather", '{"city": "Pa')],
    ),
    (
        "hermes",
        'a <tool_call>{"name": "now"}</tool_call> b\n',
        "a  b",
        [NOW],
    ),
    # Llama 3
    (
        "llama3",
        '{"name": "weather", "parameters": {"city": "Paris"}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [WEATHER, NOW],
    ),
    (
        "llama3",
        'Sure.<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        "Sure.",
        [NOW],
    ),
    (
        "llama3",
        '\n{"name": "now", "parameters": {}} and {"name": "now"}',
        'and {"name": "now"}',
        [NOW],
    ),
    # Mistral
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [WEATHER, NOW],
    ),
    (
        "mistral",
        f"Ok[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}",
        "Ok",
        [WEATHER, NOW],
    ),
    # Python
    (
        "pythonic",
        "[weather(city='Paris', days=-1, all=true), now()]",
        "",
        [("weather", '{"city": "Paris", "days": -1, "all": true}'), NOW],
    ),
    (
        "pythonic",
        'See <|python_start|>[weather(city="a)]\\"", days=[1, {"k": None}])]'
        "<|python_end|>",
        "See",
        [("weather", '{"city": "a)]\\"", "days": [1, {"k": null}]}')],
    ),
    # Qwen3-Coder
    (
        "qwen3_coder",
        "Ok\n<tool_call>\n<function=weather>\n<parameter=city>\n 1\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=all>\nTrue\n</parameter>\n"
        "</function>\n</tool_call>",
        "Ok",
        [("weather", '{"city": " 1", "days": 3, "all": true}')],
    ),
    ("qwen3_coder", "<function=now>\n</function>", "", [NOW]),
    (
        "qwen3_coder",  # no value of the declared type, and a parameter nobody declared
        "<function=weather><parameter=days>soon</parameter><parameter=x>1</parameter>"
        "</function>",
        "",
        [("weather", '{"days": "soon", "x": "1"}')],
    ),
    (
        "qwen3_coder",  # the length ended it: the client must not take it as whole
        "<function=weather><parameter=city>Paris</parameter><parameter=da",
        "",
        [("weather", '{"city": "Paris"')],
    ),
    # DeepSeek V3
    (
        "deepseekv3",
        f"<｜tool▁calls▁begin｜>{DS_CALL}weather\n```json\n{PARIS}{DS_END}\n"
        f"{DS_CALL}now\n```json\n{{}}{DS_END}<｜tool▁calls▁end｜>",
        "",
        [WEATHER, NOW],
    ),
    # gpt-oss
    (
        "gpt-oss",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        + PARIS
        + "<|call|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}",
        "",
        [WEATHER, NOW],
    ),
    # An output that must be calls
    (
        "array",
        ' [ {"name": "weather", "parameters": {"city": "Paris"}},\n'
        '{"name": "now", "parameters": {}} ] ',
        "",
        [WEATHER, NOW],
    ),
    ("array", '[{"name": "weather", "parameters": {"ci', "", [("weather", '{"ci')]),
]


@pytest.mark.parametrize(("parser", "text", "shown", "calls"), CASES)
def test_a_text_and_its_characters_one_by_one(
    parser: str, text: str, shown: str, calls: list[tuple[str, str]]
) -> None:
    assert parse(ALL[parser], [text]) == (shown, calls)
    assert parse(ALL[parser], text) == (shown, calls)


TEXTS = [
    ("hermes", "a <b> and <tool_call> and {} \n"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "argu'),
    ("hermes", '<tool_call>{"name": "now", "x": oops <tool_call'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"\\ud800\\": 1}"}'),
    ("llama3", 'The JSON {"name": "now", "parameters": {}}'),
    ("llama3", '  {"city": "Paris"}  '),
    ("llama3", '{"name": "now"'),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] none [ARGS]"),
    ("mistral", "[TOOL_CALLS]now[ARGS] 5"),
    ("pythonic", "see [1], [weather], [weather(1)] and [weather(city=f(x))]"),
    ("pythonic", "[weather(city=name)] [weather(**x)] [weather(city={1: 2})]"),
    ("pythonic", "[weather(city=1e999)] [weather(city={1})] [weather(city=1j)]"),
    ("pythonic", "[weather(city='a' [weather(city=" + "[" * 500),
    ("qwen3_coder", "<tool_call>\n<function=other>\n</function></tool_call>"),
    ("qwen3_coder", "if a <function= b"),
    ("deepseekv3", f"{DS_CALL}other\n```json\n{{}}{DS_END}"),
    ("gpt-oss", "<|channel|>final<|message|>Hi"),
]


@pytest.mark.parametrize(("parser", "text"), TEXTS)
def test_a_text_that_only_looks_like_a_call_stays(parser: str, text: str) -> None:
    assert parse(ALL[parser], [text]) == (text, [])
    assert parse(ALL[parser], text) == (text, [])


FRAGMENTS = {
    "array": ["[", "]", ",", "{", "}", '"name": "now"', '"parameters": {}'],
    "deepseekv3": ["\n```json\n", "```", "function<｜tool▁sep｜>now"],
    "gpt-oss": ["assistant", "commentary", " to=functions.now", "{", "}"],
    "pythonic": ["[", "]", "now(", "weather(", ")", "a=", "1", "'", '"', ", ", "\\"],
    "qwen3_coder": ["<function=now>", "</function>", "<parameter=a>", "</parameter>"],
}
JSON_FRAGMENTS = [
    '{"name": "now", "arguments": {"a": [1, "x"]}}',
    '{"name": "weather", "parameters": {}}',
    '{"name": "other", "arguments": {}}',
    *("{", "}", "[", "]", ",", ";", '"', "\\", ":", '"name": "now"', '"arguments": '),
]


@st.composite
def fragmented(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A format, and a text of it in pieces: calls, halves of calls, prose."""
    parser = draw(st.sampled_from(sorted(ALL)))
    marks = [*ALL[parser].openers, *ALL[parser].marks]
    words = FRAGMENTS.get(parser, JSON_FRAGMENTS) + marks
    words += [mark[:-2] for mark in marks] + [" ", "\n", "a", "é", "</", "<"]
    words += [text for name, text, _, _ in CASES if name == parser]
    text = "".join(draw(st.lists(st.sampled_from(words), max_size=12)))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    ends = [0, *cuts, len(text)]
    return parser, [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]


@settings(max_examples=600, deadline=None)
@given(fragmented())
def test_fragmentation_changes_nothing(case: tuple[str, list[str]]) -> None:
    parser, pieces = case
    text = "".join(pieces)
    whole = parse(ALL[parser], [text])
    assert parse(ALL[parser], pieces) == whole
    assert parse(ALL[parser], text) == whole
    # The list of calls is this server's own: what is no call is shown to nobody.
    shown = "" if ALL[parser].is_whole else text
    if not whole[1]:
        assert whole[0] == shown
    for name, arguments in whole[1]:
        assert name in ("weather", "now")
        arguments.encode()
    assert parse(ALL[parser], pieces, tools=[]) == (shown, [])


BEGUN = {
    "array": '[{"name": "weather", "parameters": ',
    "deepseekv3": f"{DS_CALL}weather\n```json\n",
    "gpt-oss": "<|channel|>commentary to=functions.weather<|message|>",
    "hermes": '<tool_call>{"name": "weather", "arguments": ',
    "llama3": '{"name": "weather", "parameters": ',
    "mistral": "[TOOL_CALLS]weather[ARGS]",
}


@pytest.mark.parametrize("parser", sorted(BEGUN))
def test_arguments_come_out_while_they_come_in(parser: str) -> None:
    detector = ALL[parser](TOOLS)
    out = [f for char in BEGUN[parser] + '{"city": "Pa' for f in detector.push(char)]
    calls = collect_calls(d for d in out if isinstance(d, CallDelta))
    assert [call.arguments for call in calls] == ['{"city": "Pa']


def test_a_limit_of_calls() -> None:
    text = CASES[0][1] + "\nDone."
    assert parse(ALL["hermes"], text, max_calls=1) == (
        "Let me see.\n\n\nDone.",
        [WEATHER],
    )


def test_ids() -> None:
    def ids(parser: str, text: str) -> list[str]:
        _, calls = parse_calls(text, parser=parser, tools=TOOLS)
        return [call.call_id for call in calls]

    first, second = ids("qwen25", CASES[0][1])
    assert first.startswith("call_") and first != second
    for name in ids("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"):
        assert len(name) == 9 and name.isalnum() and name.isascii()


def test_an_attempt_ends_where_it_has_read_too_much() -> None:
    """A text full of openers costs a bounded number of characters for each."""
    text = '<tool_call>{"a": "' + "x" * MAX_ATTEMPT_CHARS
    detector = ALL["hermes"](TOOLS)
    out = detector.push(text)
    assert "".join(str(piece) for piece in out) == text


@pytest.mark.parametrize("kind", ALL.values(), ids=list(ALL))
def test_openers_are_read_a_bounded_number_of_times(
    kind: CallFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An opener in a text of openers does not read them all."""
    reads = 0
    take = TextSource.take

    def counted(source: TextSource, count: int = 1) -> Read[str]:
        nonlocal reads
        reads += 1
        return (yield from take(source, count))

    monkeypatch.setattr(TextSource, "take", counted)
    for opener in (*kind.openers, *kind.bare_openers):
        for rest in ('{"a":{', '{"a":["', '{"b":', "now(a=[", 'now(a="', "=now>", ""):
            reads = 0
            n = 400
            parse(kind, [(opener + rest) * n])
            assert reads < 40 * n, (opener, rest)


def test_openers_do_not_begin_each_other() -> None:
    for kind in ALL.values():
        for one in kind.openers:
            assert not any(o != one and o.startswith(one) for o in kind.openers)


def test_long_arguments_arrive_whole() -> None:
    value = {"city": "x" * 50_000, "days": list(range(5000))}
    for parser, text in (
        ("hermes", '<tool_call>{"name": "weather", "arguments": %s}</tool_call>'),
        ("pythonic", '[weather(city="%s", days=%s)]'),
    ):
        body = (value["city"], value["days"]) if "days" in text else json.dumps(value)
        _, calls = parse(ALL[parser], [text % body])
        assert json.loads(calls[0][1]) == value


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
