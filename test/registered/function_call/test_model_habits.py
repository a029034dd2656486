"""Calls that models write a little differently from their format, by kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang.srt.function_call.call_formats import FORMATS, JSON_ARRAY
from sglang.srt.function_call.core_types import CallDelta, Tool
from sglang.srt.function_call.function_call_parser import collect_calls
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

TOOLS = [
    Tool(
        name="run",
        parameters={
            "type": "object",
            "properties": {"command": {"type": "string"}, "from": {"type": "integer"}},
        },
    ),
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    ),
    Tool(name="free"),
]
ALL = FORMATS | {"array": JSON_ARRAY}
Calls = list[tuple[str, Any]]
PARIS: Calls = [("get_weather", {"city": "Paris"})]
BOTH: Calls = [("run", {"command": "a"}), ("get_weather", {"city": "b"})]


def parse(parser: str, text: str) -> tuple[str, Calls]:
    """Text and calls; the same whole and character by character."""
    found = []
    for pieces in ([text], text):
        detector = ALL[parser](TOOLS)
        out = [piece for part in pieces for piece in detector.push(part)]
        out += detector.finish()
        calls = collect_calls(piece for piece in out if isinstance(piece, CallDelta))
        shown = "".join(piece for piece in out if isinstance(piece, str))
        found.append((shown, [(call.name, call.arguments) for call in calls]))
    assert found[0] == found[1]
    shown, raw = found[0]
    return shown, [(name, json.loads(arguments)) for name, arguments in raw]


def tag_call(name: str, body: str) -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


RUN_A = "<parameter=command>\na\n"
UNCLOSED: list[tuple[str, str, Calls]] = [
    (
        "qwen3_coder",
        f"{tag_call('run', RUN_A)}\n"
        + tag_call("get_weather", "<parameter=city>\nb\n</parameter>\n"),
        BOTH,
    ),
    (
        "qwen3_coder",
        tag_call("run", RUN_A + "<parameter=from>\n5\n</parameter>\n"),
        [("run", {"command": "a", "from": 5})],
    ),
    (
        "qwen3_coder",  # a parameter that the tool does not declare
        tag_call("run", RUN_A + "<parameter=other>\n5\n</parameter>\n"),
        [("run", {"command": "a", "other": "5"})],
    ),
    (
        "qwen3_coder",
        "<function=run><parameter=command>a<parameter=from>5</function>",
        [("run", {"command": "a", "from": 5})],
    ),
    ("qwen3_coder", f"<tool_call>\n<function=run>\n{RUN_A}</tool_call>", BOTH[:1]),
    ("qwen3_coder", f"<function=run>\n{RUN_A}</function>", BOTH[:1]),
    (
        "qwen3_coder",
        f"<function=run>\n{RUN_A}<function=get_weather>\n"
        "<parameter=city>\nb\n</parameter>\n</function>",
        BOTH,
    ),
    (
        "qwen3_coder",
        f"<tool_call>\n<function=run>\n{RUN_A}<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nb\n</parameter>\n</function>\n</tool_call>",
        BOTH,
    ),
    (
        "qwen3_coder",
        tag_call("free", "<parameter=x>\n1\n<parameter=y>\n2\n"),
        [("free", {"x": "1", "y": "2"})],
    ),
    (
        "minimax-m2",
        '<minimax:tool_call><invoke name="run"><parameter name="command">a</invoke>'
        '<invoke name="get_weather"><parameter name="city">b</invoke>'
        "</minimax:tool_call>",
        BOTH,
    ),
    (
        "glm45",
        "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>a\n</tool_call>\n"
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>b</arg_value>\n"
        "</tool_call>",
        BOTH,
    ),
    (
        "deepseekv32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="run">'
        '<｜DSML｜parameter name="command" string="true">a</｜DSML｜invoke>'
        '<｜DSML｜invoke name="get_weather">'
        '<｜DSML｜parameter name="city" string="true">b</｜DSML｜function_calls>',
        BOTH,
    ),
    (
        "step3",
        '<｜tool_calls_begin｜><steptml:invoke name="run"><steptml:parameter '
        'name="command">a<steptml:parameter name="from">5</steptml:invoke>',
        [("run", {"command": "a", "from": 5})],
    ),
]


@pytest.mark.parametrize(("parser", "text", "calls"), UNCLOSED)
def test_a_value_without_its_end_tag(parser: str, text: str, calls: Calls) -> None:
    assert parse(parser, text) == ("", calls)


@pytest.mark.parametrize(
    "value",
    [
        "a</tool_call>b",
        "</tool_call>",
        "</function></tool_call>",
        "a\n</function>\n</tool_call>\nb",
        "use <parameter=x> here",
        "the <parameter=command> again",
        "if a <tool_call> b",
        "see <function=get_weather> in the file",
        "<function=",
        "</parameter",
        "<tool_call>\n<function",
    ],
)
def test_marks_within_a_closed_string(value: str) -> None:
    body = f"<parameter=command>\n{value}\n</parameter>\n"
    other = "<parameter=from>\n1\n</parameter>\n"
    assert parse("qwen3_coder", tag_call("run", body)) == (
        "",
        [("run", {"command": value})],
    )
    assert parse("qwen3_coder", tag_call("run", body + other)) == (
        "",
        [("run", {"command": value, "from": 1})],
    )
    glm = f"<tool_call>run<arg_key>command</arg_key><arg_value>{value}</arg_value>"
    assert parse("glm47", f"{glm}</tool_call>") == ("", [("run", {"command": value})])


def test_text_behind_an_unclosed_value() -> None:
    text = f"<function=run>\n{RUN_A}</function>\n\nDone, see </b>."
    assert parse("qwen3_coder", text) == ("Done, see </b>.", BOTH[:1])


@pytest.mark.parametrize(
    "body",
    [
        "First the command:\n<parameter=command>\na\n</parameter>\n",
        "<parameter=command>\na\n</parameter>\n</parameter>\n",
        "<parameter=command>\na\n</parameter>,\n",
        "<parameter=command>\na\n</parameter>\n<!-- that is all -->\n",
    ],
)
def test_text_between_the_tags_of_a_call(body: str) -> None:
    other = "<parameter=from>\n1\n</parameter>\n"
    assert parse("qwen3_coder", tag_call("run", body)) == ("", BOTH[:1])
    calls = [("run", {"command": "a", "from": 1})]
    assert parse("qwen3_coder", tag_call("run", body + other)) == ("", calls)


def test_text_behind_a_call_without_an_end() -> None:
    text = "<function=free>\nI have called it, <b>see</b>."
    shown = "I have called it, <b>see</b>."
    assert parse("qwen3_coder", text) == (shown, [("free", {})])


OBJECTS = [
    "{'city': 'Paris'}",
    "{\"city\": 'Paris'}",
    "{'city': \"Paris\"}",
    "{city: 'Paris'}",
    '{"city": "Paris",}',
    "{'city' : u'Par' 'is', }",
    '{"city": """Paris"""}',
    '{"city": "Paris"',
    '{"city": "Paris"]}',
    '"{\\"city\\": \\"Paris\\"}"',
    "\"{'city': 'Paris'}\"",
]


@pytest.mark.parametrize("written", OBJECTS)
def test_objects_that_are_almost_json(written: str) -> None:
    call = f'"name": "get_weather", "arguments": {written}'
    assert parse("hermes", f"<tool_call>{{{call}}}</tool_call>") == ("", PARIS)
    if written.endswith("}"):
        llama = call.replace("arguments", "parameters")
        assert parse("llama3", f"{{{llama}}}") == ("", PARIS)
        assert parse("mistral", f"[TOOL_CALLS]get_weather[ARGS]{written}") == (
            "",
            PARIS,
        )


VALUES: list[tuple[str, Any]] = [
    ("True", True),
    ("None", None),
    ("[False, null]", [False, None]),
    ("(1, 2)", [1, 2]),
    ("03", 3),
    ("+5", 5),
    ("1_000", 1000),
    ("0x1f", 31),
    (".5", 0.5),
    ("'it\\'s'", "it's"),
    ("'say \"hi\"'", 'say "hi"'),
    ('"C:\\dir\\x41"', "C:\\dirA"),
    ('"two\nlines\tand a tab"', "two\nlines\tand a tab"),
    ("r'\\d'", "\\d"),
    ("'\\U0001f600\\xe9'", "😀é"),
    ("{'a': {b: [1, ], }, }", {"a": {"b": [1]}}),
]


@pytest.mark.parametrize(("written", "value"), VALUES)
def test_values_that_are_almost_json(written: str, value: Any) -> None:
    calls = [("free", {"x": value})]
    arguments = f'{{"x": {written}}}'
    text = f'<tool_call>{{"name": "free", "arguments": {arguments}}}</tool_call>'
    assert parse("hermes", text) == ("", calls)
    assert parse("kimi_k2", kimi("functions.free:0", arguments)) == ("", calls)
    text = f'{{"parameters": {arguments}, "name": "free"}}'
    assert parse("llama3", text) == ("", calls)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":[1,{"b":null}],"c":"\\u00e9\\n\\"" , "d":1e5}',
        '{ "a" : -0.0 }',
        '{"a": "\\\\", "\\ud83d\\ude00": ""}',
        '{"a": "</tool_call>\'\\/"}',
        '{\n  "a": true\n}',
    ],
)
def test_json_stays_as_the_model_wrote_it(arguments: str) -> None:
    detector = ALL["hermes"](TOOLS)
    text = f'<tool_call>{{"name": "free", "arguments": {arguments}}}</tool_call>'
    out = [piece for char in text for piece in detector.push(char)]
    (call,) = collect_calls(piece for piece in out if isinstance(piece, CallDelta))
    assert call.arguments == arguments


ONE = '{"name": "run", "arguments": {"command": "a"}}'
TWO = '{"name": "get_weather", "arguments": {"city": "b"}}'
LISTS: list[tuple[str, str]] = [
    ("hermes", f"<tool_call>\n[{ONE}, {TWO}]\n</tool_call>"),
    ("qwen", f"<tool_call>[{ONE},{TWO}]</tool_call>"),
    ("qwen25", f"<tool_call>\n{ONE}\n{TWO}\n</tool_call>"),
    ("hermes", f"<tool_call>{ONE}, {TWO}</tool_call>"),
    ("hermes", f"<tool_call>{ONE}<tool_call>{TWO}"),
    ("hermes", f"<tool_call>[{ONE}, {TWO},]</tool_call>"),
    ("hermes", f"<tool_call>[{ONE}, {TWO}\n</tool_call>"),
    ("hermes", f"<tool_call>{ONE}}}\n</tool_call>\n<tool_call>{TWO}]}} </tool_call>"),
    ("qwen3_coder", f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>"),
    ("llama3", f"[{ONE}, {TWO}]"),
    ("llama3", f"{ONE}\n{TWO}"),
    ("llama3", f"<|python_tag|>[{ONE}, {TWO}]"),
    ("mistral", f"[TOOL_CALLS]{ONE}, {TWO}"),
    ("pythonic", f"[{ONE}, {TWO}]"),
    ("pythonic", f"{ONE}; {TWO}"),
    ("llama4", f"<|python_start|>{ONE}{TWO}<|python_end|>"),
    ("lfm2", f"<|tool_call_start|>[{ONE}, {TWO}]<|tool_call_end|>"),
]


@pytest.mark.parametrize(("parser", "text"), LISTS)
def test_several_calls_where_one_is_usual(parser: str, text: str) -> None:
    assert parse(parser, text) == ("", BOTH)


HEREDOC = "cat > f <<EOF\nline\nEOF"
PYTHON: list[tuple[str, Calls]] = [
    (f"run(command='{HEREDOC}')", [("run", {"command": HEREDOC})]),
    ('run(command="a\n\n\tb")', [("run", {"command": "a\n\n\tb"})]),
    ("run(from=1)", [("run", {"from": 1})]),
    (
        "free(class='a', import=True, lambda=None)",
        [("free", {"class": "a", "import": True, "lambda": None})],
    ),
    ("free(True=1, x=[{'from': (1,)}])", [("free", {"True": 1, "x": [{"from": [1]}]})]),
    ('run(command="""a "quoted"\nb""")', [("run", {"command": 'a "quoted"\nb'})]),
    ("run(command='''it's''')", [("run", {"command": "it's"})]),
    ("run( command = 'a' , )", [("run", {"command": "a"})]),
    ("free(x=true, y=null)", [("free", {"x": True, "y": None})]),
    ("run(command=r'\\d+')", [("run", {"command": "\\d+"})]),
    (
        "run(command='a)]', from=-1), free()",
        [("run", {"command": "a)]", "from": -1}), ("free", {})],
    ),
]


@pytest.mark.parametrize(("inner", "calls"), PYTHON)
def test_calls_that_are_almost_python(inner: str, calls: Calls) -> None:
    assert parse("pythonic", f"[{inner}]") == ("", calls)
    text = f"<|tool_call_start|>[{inner}]<|tool_call_end|>"
    assert parse("lfm2", text) == ("", calls)


@pytest.mark.parametrize(
    "inner",
    ["a={[]}", "a={{}}", "a={{}: 1}", "a={[1]: 2}", "a={(1, []): 2}", "a={None}"]
    + ["a=b'x'", "a=...", "a=1j", "a=f(1)", "a=x.y", "a=1 if b else 2", "*a", "**a"]
    + ["a=[i for i in b]", "a=", "=1", "a=1 b=2", "a==1", "(a=1)", "a=-'x'", "a='"]
    + ["a=" + "[" * 3000, "a=" + "-" * 3000 + "1", "a=" + "(" * 99 + "1", "a=\\"],
)
def test_python_that_is_no_call_stays_text(inner: str) -> None:
    text = f"[free({inner})]"
    assert parse("pythonic", text) == (text, [])


def kimi(call_id: str, arguments: str) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{call_id}"
        f"<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )


HEADERS: list[tuple[str, str]] = [
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}'),
    ("mistral", '[TOOL_CALLS] get_weather {"city": "Paris"}'),
    ("mistral", '[TOOL_CALLS]get_weather\n{"city": "Paris"}'),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}'),
    ("mistral", '[TOOL_CALLS]get_weather [ARGS] {"city": "Paris"}'),
    ("kimi_k2", kimi("functions.get_weather:0", '{"city": "Paris"}')),
    ("kimi_k2", kimi(" functions.get_weather:12 ", ' {"city": "Paris"}')),
    ("kimi_k2", kimi("get_weather:0", '{"city": "Paris"}')),
    ("kimi_k2", kimi("functions.get_weather:0", '{"city": "Paris"}}')),
    (
        "kimi_k2",
        kimi("functions.get_weather:0", '{"city": "Paris"}').replace("calls", "call"),
    ),
    (
        "deepseekv3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>',
    ),
    (
        "deepseekv3",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n{"city": "Paris"}',
    ),
    (
        "deepseekv31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}',
    ),
    (
        "deepseekv32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="get_weather">{"city": "Paris"}'
        "</｜DSML｜invoke></｜DSML｜function_calls>",
    ),
    ("qwen3_coder", '<function=get_weather>\n{"city": "Paris"}\n</function>'),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'),
    ("gemma4", '<|tool_call>call: get_weather {"city": "Paris"}'),
]


@pytest.mark.parametrize(("parser", "text"), HEADERS)
def test_the_name_before_the_arguments(parser: str, text: str) -> None:
    assert parse(parser, text) == ("", PARIS)


def test_the_schema_counts_more_than_the_tag() -> None:
    """Where a string is not allowed, `string="true"` makes none."""
    begin = '<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name='
    for name, said, text, value in [
        ("days", "true", "5", 5),
        ("days", "false", "5", 5),
        ("city", "true", "5", "5"),
        ("city", "false", '"x"', "x"),
        ("city", "false", "x", "x"),
        ("other", "true", "[1]", "[1]"),
        ("other", "false", "[1]", [1]),
    ]:
        call = f'{begin}"{name}" string="{said}">{text}</｜DSML｜parameter>'
        calls = [("get_weather", {name: value})]
        assert parse("deepseekv32", f"{call}</｜DSML｜invoke>") == ("", calls)


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "kimi_k2"])
def test_a_mark_that_was_cut_off_is_no_text(parser: str) -> None:
    text = {
        "hermes": f"<tool_call>\n{ONE}\n</tool_call>",
        "qwen3_coder": tag_call("run", RUN_A + "</parameter>\n"),
        "kimi_k2": kimi("functions.free:0", "{}"),
    }[parser]
    for end in range(len(text)):
        for pieces in ([text[:end]], text[:end]):
            detector = ALL[parser](TOOLS)
            out = [piece for part in pieces for piece in detector.push(part)]
            out += detector.finish()
            has_call = any(isinstance(piece, CallDelta) for piece in out)
            shown = "".join(piece for piece in out if isinstance(piece, str))
            assert has_call != bool(shown) or not text[:end], text[:end]


def test_kimi_keeps_its_ids() -> None:
    detector = ALL["kimi_k2"](TOOLS)
    out = detector.push(kimi("functions.free:3", "{}") + kimi("free:4", "{}"))
    calls = collect_calls(piece for piece in out if isinstance(piece, CallDelta))
    assert [call.call_id for call in calls] == ["functions.free:3", "free:4"]


@pytest.mark.parametrize(
    "text", ["[", '[{"na', '[{"name": "ru', '[{"name": "run", "parameters":', "[ {"]
)
def test_a_required_call_that_was_cut_off_has_no_text(text: str) -> None:
    """The list is the server's own, not what the model says."""
    assert parse("array", text) == ("", [])


def test_what_follows_a_required_call_is_cut_off_with_it() -> None:
    call = '[{"name": "run", "parameters": {"command": "a"}}'
    assert parse("array", f'{call}, {{"name": "get') == ("", BOTH[:1])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
