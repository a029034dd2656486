"""The value that a text without quotes means, by the schema of its parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.function_call.schema_values import read_text
from sglang.srt.function_call.tool_schema import (
    ANYTHING,
    MAX_STEPS,
    ToolSchema,
    kind_of,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
BOOLEAN, STRING = {"type": "boolean"}, {"type": "string"}
OBJECT, LIST = {"type": "object"}, {"type": "array"}
DEFINITIONS: dict[str, Any] = {
    "count": INTEGER,
    "again": {"$ref": "#/$defs/count"},
    "a/b": BOOLEAN,
    "loop": {"$ref": "#/$defs/loop"},
    "level": {"enum": [1, 2, 3]},
}


def optional(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


CASES: list[tuple[Any, str, Any]] = [
    # One type
    (STRING, "5", "5"),
    (STRING, "null", "null"),
    (STRING, "true", "true"),
    (STRING, '{"a": 1}', '{"a": 1}'),
    (STRING, ' "x" ', ' "x" '),
    (INTEGER, "5", 5),
    (INTEGER, " 5\n", 5),
    (INTEGER, "03", 3),
    (INTEGER, "+5", 5),
    (INTEGER, "-07", -7),
    (INTEGER, "1_000", 1000),
    (INTEGER, "0x1F", 31),
    (INTEGER, "5.0", 5),
    (INTEGER, '"5"', 5),
    (INTEGER, "5.5", "5.5"),
    (INTEGER, "five", "five"),
    (INTEGER, "9" * 5000, "9" * 5000),
    (NUMBER, "5", 5),
    (NUMBER, "1_0.5", 10.5),
    (NUMBER, ".5", 0.5),
    (NUMBER, "-2.", -2.0),
    (NUMBER, "1e3", 1000.0),
    (NUMBER, "NaN", "NaN"),
    (NUMBER, "Infinity", "Infinity"),
    (NUMBER, "1e999", "1e999"),
    (BOOLEAN, "true", True),
    (BOOLEAN, "False", False),
    (BOOLEAN, "yes", True),
    (BOOLEAN, "no", False),
    (BOOLEAN, "1", True),
    (BOOLEAN, "0", False),
    (BOOLEAN, "ON", True),
    (BOOLEAN, "n", False),
    (BOOLEAN, "2", "2"),
    (BOOLEAN, "maybe", "maybe"),
    ({"type": "null"}, "None", None),
    (OBJECT, '{"a": [1]}', {"a": [1]}),
    (OBJECT, "{'a': True, 'b': None}", {"a": True, "b": None}),
    (OBJECT, "{'it': \"it's\"}", {"it": "it's"}),
    (OBJECT, '{"a": "two\nlines"}', {"a": "two\nlines"}),
    (OBJECT, '{"a": 1,}', {"a": 1}),
    (OBJECT, "{a: 1}", {"a": 1}),
    (OBJECT, "[1]", "[1]"),
    (OBJECT, "{1}", "{1}"),
    (OBJECT, "{" * 2000, "{" * 2000),
    (LIST, "[1, 'a', None]", [1, "a", None]),
    (LIST, "(1, 2)", [1, 2]),
    (LIST, "[(1, 2), [3]]", [[1, 2], [3]]),
    (LIST, "['a' 'b']", ["ab"]),
    (LIST, "[f(x)]", "[f(x)]"),
    (LIST, "a, b", "a, b"),
    (LIST, "[NaN]", "[NaN]"),
    # Several types
    (optional(STRING), "null", None),
    (optional(STRING), "None", None),
    (optional(STRING), "nullable", "nullable"),
    (optional(INTEGER), "null", None),
    (optional(INTEGER), "", None),
    (optional(INTEGER), "7", 7),
    (optional(BOOLEAN), "none", None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["integer", "string"]}, "5", "5"),
    ({"type": ["integer", "boolean"]}, "1", 1),
    ({"type": ["integer", "boolean"]}, "yes", True),
    ({"oneOf": [INTEGER, BOOLEAN]}, "true", True),
    ({"anyOf": [STRING, LIST]}, '["a"]', ["a"]),
    ({"anyOf": [STRING, LIST]}, "[a", "[a"),
    ({"anyOf": [STRING, OBJECT]}, "{'a': 1}", {"a": 1}),
    ({"type": "integer", "nullable": True}, "null", None),
    # Constants
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": [1, 2]}, "02", 2),
    ({"enum": [1, 2]}, "3", "3"),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"enum": ["auto", 1, None]}, "1", 1),
    ({"enum": ["auto", 1, None]}, "auto", "auto"),
    ({"enum": ["auto", 1, None]}, "null", None),
    ({"enum": ["a", "b"]}, ' "a" ', "a"),
    ({"enum": [True]}, "yes", True),
    ({"type": "string", "enum": ["1"]}, "1", "1"),
    ({"type": "number", "enum": [0.5, 1]}, "1.0", 1),
    ({"const": 7}, "7", 7),
    ({"const": False}, "false", False),
    ({"const": "7"}, "7", "7"),
    ({"anyOf": [{"const": 1}, {"const": "x"}]}, "1", 1),
    # Other places of the schema
    ({"$ref": "#/$defs/count"}, "5", 5),
    ({"$ref": "#/$defs/again"}, "5", 5),
    ({"$ref": "#/$defs/a~1b"}, "no", False),
    ({"$ref": "#/$defs/level", "description": "x"}, "3", 3),
    (optional({"$ref": "#/$defs/count"}), "null", None),
    ({"allOf": [{"$ref": "#/$defs/count"}]}, "5", 5),
    ({"allOf": [NUMBER, INTEGER]}, "5", 5),
    ({"allOf": [{"minimum": 1}, {"type": ["integer", "null"]}]}, "null", None),
    ({"allOf": [optional(INTEGER), INTEGER]}, "null", "null"),
    # No type: what is there says it, or the text stays
    ({"properties": {"a": INTEGER}}, '{"a": 1}', {"a": 1}),
    ({"items": INTEGER}, "[1]", [1]),
    ({}, "5", "5"),
    ({"description": "x"}, "true", "true"),
    (True, "5", "5"),
    # Names that clients write for the types
    ({"type": "int"}, "5", 5),
    ({"type": "dict"}, "{}", {}),
    ({"type": "OBJECT"}, "{}", {}),
    ({"type": "float"}, "1.5", 1.5),
    # No schema
    ({"$ref": "#/$defs/loop"}, "5", "5"),
    ({"$ref": "#/$defs/none"}, "5", "5"),
    ({"$ref": "other.json#/x"}, "5", "5"),
    ({"type": 7}, "5", "5"),
    ({"type": [None, {}]}, "5", "5"),
    ({"anyOf": 3, "enum": "x", "allOf": {}}, "5", "5"),
    (None, "5", "5"),
]


def read(schema: Any, text: str) -> Any:
    tool = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS}
    return read_text(text, ToolSchema(tool).reading("x"))


@pytest.mark.parametrize(("schema", "text", "value"), CASES)
def test_what_a_text_means(schema: Any, text: str, value: Any) -> None:
    found = read(schema, text)
    assert found == value
    assert type(found) is type(value)


def test_json_where_the_format_says_so() -> None:
    """The schema then only settles what is no JSON."""
    cases: list[tuple[str, Any]] = [("5", 5), ("true", True), ("null", None)]
    cases += [('"a"', "a"), ("[1]", [1]), ("yes", "yes"), ("{'a': 1}", {"a": 1})]
    for text, value in cases:
        assert read_text(text, ANYTHING, is_json=True) == value


@pytest.mark.parametrize(
    "tool",
    [
        {"$ref": "#/$defs/args", "$defs": {"args": {"properties": {"x": INTEGER}}}},
        {"allOf": [{"properties": {"x": INTEGER}}, {"properties": {"y": STRING}}]},
        {"anyOf": [{"properties": {"x": INTEGER}}, {"properties": {"y": STRING}}]},
        {"additionalProperties": INTEGER},
        {"properties": {"y": STRING}, "additionalProperties": INTEGER},
    ],
)
def test_where_the_parameter_is_declared(tool: dict[str, Any]) -> None:
    assert read_text("5", ToolSchema(tool).reading("x")) == 5


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
WORDS = ["type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"]
WORDS += ["items", "additionalProperties", "nullable", "$defs", "x"]
ATOMS = ["string", "integer", "number", "boolean", "null", "object", "array", "#"]
ATOMS += ["#/properties/x", "#/$defs/x", "#/anyOf/0", "#/"]
ANY_SCHEMA = st.recursive(
    st.sampled_from(ATOMS) | JSON_VALUES,
    lambda inner: (
        st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=12,
)
TEXTS = st.sampled_from(["5", "null", "yes", "{'a': 1}", "[1", '"x"', "1e999", "0x"])


@settings(max_examples=300, deadline=None)
@given(ANY_SCHEMA, TEXTS | st.text(max_size=10))
def test_any_json_is_a_schema(schema: Any, text: str) -> None:
    tool = schema if isinstance(schema, dict) else {"properties": {"x": schema}}
    json.dumps(read_text(text, ToolSchema(tool).reading("x")), allow_nan=False)


SIMPLE: dict[str, Any] = {kind: {"type": kind} for kind in ATOMS[:7]}


@settings(max_examples=300, deadline=None)
@given(JSON_VALUES, st.lists(st.sampled_from(ATOMS[:7]), min_size=1, max_size=3))
def test_a_value_of_the_schema_comes_back(value: Any, kinds: list[str]) -> None:
    """Whatever the schema allows and a template writes is read as a legal value."""
    kinds.append(kind_of(value))
    text = value if isinstance(value, str) else json.dumps(value)
    found = read({"anyOf": [SIMPLE[kind] for kind in kinds]}, text)
    assert kind_of(found) in kinds
    if "string" not in kinds:
        assert found == value


def test_the_cost_of_a_schema_is_its_size() -> None:
    """Each node is looked at once, however many parameters refer to it."""
    union = {"anyOf": [{"type": "integer"}] * 1000}
    names = [f"p{i}" for i in range(1000)]
    schema = ToolSchema(
        {
            "properties": {name: {"$ref": "#/$defs/union"} for name in names},
            "$defs": {"union": union},
        }
    )
    for name in names * 3:
        assert read_text("5", schema.reading(name)) == 5
    assert schema.steps <= 3000


def test_a_schema_that_doubles_itself_is_bounded() -> None:
    levels = {
        f"l{i}": {"anyOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(2000)
    }
    levels["l2000"] = {"enum": list(range(300))}
    schema = ToolSchema({"properties": {"x": {"$ref": "#/$defs/l0"}}, "$defs": levels})
    schema.reading("x")
    assert schema.steps < MAX_STEPS


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
