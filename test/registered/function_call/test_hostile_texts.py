"""Texts and schemas that try to make parsing fail, or cost more than their size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.function_call.base_detector import CallFormat
from sglang.srt.function_call.call_formats import FORMATS, JSON_ARRAY
from sglang.srt.function_call.core_types import CallDelta, Tool
from sglang.srt.function_call.function_call_parser import collect_calls
from sglang.srt.function_call.relaxed_json import RelaxedCopier
from sglang.srt.function_call.tag_detector import TagFormat
from sglang.srt.utils.text_source import (
    ATTEMPT_COST_CHARS,
    FREE_REREAD_CHARS,
    MAX_ATTEMPT_CHARS,
    TextSource,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu", full_time=180)

ALL = FORMATS | {"array": JSON_ARRAY}
# Without the names that share a format.
DISTINCT = sorted({id(form): name for name, form in ALL.items()}.values())
TOOL = Tool(
    name="f",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    },
)
JSON_PIECES = [
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {'),
    *('"arguments": ', '"name": "f"', "True", "None", "null", "1", "03", "1e999", "0x"),
    *("{", "}", "[", "]", "(", ")", ",", ";", ":", "=", ">", '"', "'", '"""', "'''"),
    *("\\", "\\u12", "\\x4", "f", "f(", "a=", "f>", '"f">', "f:0", "call:f", "{a:"),
    *("function", "```json\n", "```", " to=functions.f", " ", "\n", "é", "😀", "<"),
    *('string="false"', 'string="true"', "</", "name="),
]


def marks_of(form: CallFormat) -> list[str]:
    """All strings of a format, whole and almost whole, and tags made of them."""
    marks = [*form.marks, *form.bare_openers]
    if isinstance(form, TagFormat):
        tags = [form.call, form.parameter, form.value, form.value_end]
        tags += [f"{tag}{name}" for tag in tags for name in ("f>", '"a">', "a")]
        marks += [tag for tag in tags if tag] + [form.parameter_head_end]
    return marks + [mark[:-1] for mark in marks if len(mark) > 1]


def parse(
    form: CallFormat, pieces: Sequence[str], tools: Sequence[Tool] = (TOOL,)
) -> tuple[str, list[tuple[str, str]]]:
    detector = form(tools)
    out = [found for piece in pieces for found in detector.push(piece)]
    out += detector.finish()
    calls = collect_calls(piece for piece in out if isinstance(piece, CallDelta))
    shown = "".join(piece for piece in out if isinstance(piece, str))
    return shown, [(call.name, call.arguments) for call in calls]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["string", "integer", "null", "object", "#", "#/properties/a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "$ref",
                    "anyOf",
                    "allOf",
                    "enum",
                    "const",
                    "a",
                    "n",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
SCHEMAS = st.dictionaries(
    st.sampled_from(["type", "properties", "$ref", "anyOf", "additionalProperties"]),
    JSON_VALUES,
    max_size=3,
) | JSON_VALUES.map(lambda value: {"properties": {"a": value}})


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, list[str], Tool]:
    """A format, a text of its marks, calls and halves of them in pieces, and a tool."""
    parser = draw(st.sampled_from(DISTINCT))
    words = st.sampled_from(JSON_PIECES) | st.sampled_from(marks_of(ALL[parser]))
    text = "".join(draw(st.lists(words | st.text(max_size=3), max_size=16)))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    ends = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    return parser, pieces, Tool(name="f", parameters=draw(SCHEMAS))


@settings(max_examples=count(ci=250, full=5000), deadline=None)
@given(outputs())
def test_no_text_and_no_schema_raises(case: tuple[str, list[str], Tool]) -> None:
    parser, pieces, tool = case
    text = "".join(pieces)
    whole = parse(ALL[parser], [text], [tool])
    assert parse(ALL[parser], pieces, [tool]) == whole
    assert parse(ALL[parser], text, [tool]) == whole
    if not whole[1] and not ALL[parser].is_whole:
        assert whole[0] == text


class Meter:
    """Counts the characters that searches look at, and the steps of parsers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chars = 0
        self.steps = 0
        advance, step = TextSource._advance, RelaxedCopier._read_token

        def advanced(source: TextSource, to: int) -> None:
            self.chars += max(0, to - source._at)
            self.steps += 1
            advance(source, to)

        def stepped(
            copier: RelaxedCopier, text: str, at: int, end: int, is_last: bool
        ) -> int:
            self.steps += 1
            return step(copier, text, at, end, is_last)

        monkeypatch.setattr(TextSource, "_advance", advanced)
        monkeypatch.setattr(RelaxedCopier, "_read_token", stepped)


REST = ["", " " * 60, "f", "f>", '"f">', "=f>", "f(a=[", "f(a='", "f(a='\\'", "[[", "x"]
REST += [
    '{"a":{',
    '{"a":["',
    '{"b":',
    '{":',
    '{"',
    "{'",
    "{'a':'''",
    '{"name":"f","x":[',
]
REST += [
    '{"name": "f", "arguments": {}}',
    '{"name": "f", "arguments": {',
    "f{",
    "call:f{",
]


def hostile_texts(form: CallFormat, size: int) -> Iterator[str]:
    begins = (*form.openers, *form.bare_openers)
    begun = [begin + rest for begin in begins for rest in REST]
    if isinstance(form, TagFormat):
        call = next(
            text
            for text in (f"{form.call}f>", f'{form.call}"f">', f"{form.openers[0]}f\n")
            if parse(form, [text])[1]
        )
        name = (
            '"a">'
            if form.parameter.endswith("name=")
            else "a" + form.parameter_head_end
        )
        value = f"{form.parameter}{name}{form.value}1"
        begun += [call + value, call + value + form.closers[0] + "x"]
        begun += [call + value + form.parameter]
        yield call + value * (size // len(value))
        yield call + (value + form.value_end) * (size // len(value + form.value_end))
        yield call + value + (form.closers[0] + "x") * (size // len(form.closers[0]))
        yield call + value + (form.openers[0] + " ") * (size // len(form.openers[0]))
    for unit in begun:
        yield unit * (size // len(unit))
    for unit in "[{('\"\\,<":
        for begin in begins:
            yield f'{begin}{{"name": "f", "arguments": {{"a": ' + unit * size


@pytest.mark.parametrize("parser", DISTINCT)
def test_the_cost_of_a_text_is_its_length(
    parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, size = ALL[parser], count(ci=2500, full=20_000)
    texts = list(hostile_texts(form, size))
    meter = Meter(monkeypatch)
    for text in texts:
        meter.chars = meter.steps = 0
        parse(form, [text])
        bound = 4 * len(text) + 2 * FREE_REREAD_CHARS
        assert meter.chars < bound, text[:80]
        assert meter.steps < bound, text[:80]


def test_attempts_stop_where_they_have_cost_too_much() -> None:
    """Then openers are text, until more text has come."""
    failing = '<tool_call>{"a": "' + "x" * MAX_ATTEMPT_CHARS + '"'
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    many = 2 * FREE_REREAD_CHARS // ATTEMPT_COST_CHARS
    assert parse(ALL["hermes"], [failing + call])[1] == [("f", "{}")]
    dense = "<tool_call>{" * many
    assert parse(ALL["hermes"], [dense + call]) == (dense + call, [])
    assert parse(ALL["hermes"], dense + call) == (dense + call, [])
    calm = dense + "x" * ATTEMPT_COST_CHARS * many
    assert parse(ALL["hermes"], [calm + call]) == (calm, [("f", "{}")])


@pytest.mark.parametrize("parser", ["glm", "hermes", "mistral", "pythonic"])
def test_endless_white_space(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept in pieces: what waits is not copied for each."""
    form = ALL[parser]
    space = [" \n" * 500] * 200
    meter = Meter(monkeypatch)
    assert parse(form, space) == ("".join(space), [])
    opened = [*(form.openers[0], "{" if form.bare_openers else ""), *space, "x"]
    assert parse(form, opened) == ("".join(opened), [])
    assert meter.chars < 8 * sum(map(len, space))


def test_many_parameters_of_a_large_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the schema is read once, not once for each parameter."""
    names = [f"p{i}" for i in range(2000)]
    schema = {
        "properties": {name: {"$ref": "#/$defs/any"} for name in names},
        "$defs": {"any": {"anyOf": [{"type": "integer"}] * 2000}},
    }
    text = "<function=f>" + "".join(f"<parameter={n}>1</parameter>" for n in names)
    detector = ALL["qwen3_coder"]([Tool(name="f", parameters=schema)])
    deltas = [*detector.push(text + "</function>"), *detector.finish()]
    (call,) = collect_calls(piece for piece in deltas if isinstance(piece, CallDelta))
    arguments = json.loads(call.arguments)
    assert arguments == dict.fromkeys(names, 1)
    (known,) = detector._schemas.values()  # type: ignore[attr-defined]
    assert known.steps <= 3 * len(names)


@pytest.mark.parametrize("parser", DISTINCT)
def test_deep_nesting(parser: str) -> None:
    form = ALL[parser]
    for begin in (*form.openers, *form.bare_openers):
        for unit in ('{"a":', "[", "(", "{'a':[", "-", "not "):
            for head in ('{"name": "f", "arguments": {"a": ', "f(a=", "[f(a=", ""):
                text = begin + head + unit * count(ci=1000, full=5000)
                whole = parse(form, [text])
                assert whole[1] or whole[0] == text or form.is_whole


def test_a_schema_may_be_any_json() -> None:
    odd: list[Any] = [3, None, [], "x", {"properties": 3}, {"type": 7}, {"a": {"a": 1}}]
    loop = {"$ref": "#/properties/a"}
    for schema in [*odd, loop, {"anyOf": [loop, loop]}, {"allOf": [{"$ref": "#"}]}]:
        for parameters in ({"properties": {"a": schema}}, {"properties": schema}):
            tool = Tool(name="f", parameters=parameters)
            text = "<function=f><parameter=a>5</parameter></function>"
            _, calls = parse(ALL["qwen3_coder"], [text], [tool])
            assert calls[0][1] in ('{"a": "5"}', '{"a": 5}')


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
