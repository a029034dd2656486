"""Schemas as generators write them: served in other words, or refused with their path.

Each served schema has texts that must be possible and texts that must not.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from typing import Any

import pytest
from tokenizers import Tokenizer

from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.constrained.schema_closing import close_objects
from sglang.srt.constrained.schema_keywords import RULES
from sglang.srt.constrained.schema_reading import read_schema
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=5, suite="cpu")

TEXT = {"type": "string"}
INT = {"type": "integer"}
A = {"type": "object", "properties": {"a": TEXT}}
ASKS_NOTHING: list[dict[str, Any]] = [
    {"propertyNames": TEXT},
    {"propertyNames": True},
    {"propertyNames": {"minLength": 0, "description": "d"}},
    {"propertyNames": {"type": "string", "format": "path"}},
    {"propertyNames": {"enum": ["a", "b"]}},
    {"unevaluatedProperties": True},
    {"unevaluatedProperties": {}},
    {"unevaluatedProperties": False},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": True}},
    {"dependencies": {"a": []}},
    {"patternProperties": {}},
    {"minProperties": 0},
    {"maxProperties": 1},
    {"minProperties": "0", "maxProperties": 1.0},
    {"not": False},
    {"if": A},
    {"then": {"required": ["z"]}},
    {"if": A, "then": True, "else": {}},
    {"if": False, "then": {"required": ["z"]}},
    {"allOf": []},
    {"required": []},
    {"required": None, "enum": None, "items": None, "additionalProperties": None},
    {"required": False},
    {"$comment": "c", "title": "t", "examples": [1], "default": {}, "deprecated": True},
    {"readOnly": True, "writeOnly": False, "contentEncoding": "base64"},
    {"discriminator": {"propertyName": "a"}, "xml": {}, "x-order": 1, "nullable": True},
    {"$schema": "https://example.com/unknown", "$id": "https://example.com/a"},
    {"$anchor": "a", "$dynamicAnchor": "b", "$vocabulary": {}},
    {"propertyOrdering": ["a"], "externalDocs": {}, "example": 1},
    {"format": "grid"},
    {"$defs": {"unused": {"propertyNames": INT, "not": {}}}},
]


UNKNOWN_FORMATS = """
path password binary uri-reference regex phone json-string int64 byte float idn-email
iri json-pointer uri-template color markdown date-time-rfc1123 decimal enum
"""
LIST_OF_FORMATS = UNKNOWN_FORMATS.split()


def follows(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, schema: Any, text: str
) -> bool:
    grammar = backend.compile("json_schema", json.dumps(schema))
    for token in tokenizer.encode(text).ids:
        try:
            grammar.accept(token)
        except RuntimeError:
            return False
    return 0 in allowed(grammar)


def allowed(grammar: Any) -> list[int]:
    mask = grammar._matcher.compute_bitmask()
    return [i for i in (0, 2) if mask[0] >> i & 1]


@pytest.mark.parametrize("extra", ASKS_NOTHING, ids=lambda extra: "+".join(extra))
def test_what_asks_for_nothing(
    extra: dict[str, Any], backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    assert follows(backend, tokenizer, A | extra, '{"a": "x"}')


@pytest.mark.parametrize("name", LIST_OF_FORMATS)
def test_an_unknown_format_is_an_annotation(
    name: str, backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    for kind, text in (("string", '"x y"'), ("integer", "12"), ("number", "1.5")):
        assert follows(backend, tokenizer, {"type": kind, "format": name}, text)


LIST = {"type": "array", "items": INT}
MAP = {"type": "object", "additionalProperties": INT}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
SERVED: list[tuple[Any, list[str], list[str]]] = [
    (LIST | {"uniqueItems": False}, ["[1, 1]"], []),
    (LIST | {"uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1, 1]"]),
    (LIST | {"contains": True}, ["[1]"], ["[]"]),
    (LIST | {"contains": INT, "minContains": 2, "maxContains": 3}, ["[1, 1]"],
     ["[1]", "[1, 1, 1, 1]"]),
    (LIST | {"contains": {"const": 9}, "minContains": 0}, ["[]", "[1]"], []),
    (LIST | {"minContains": 5, "unevaluatedItems": False}, ["[1]"], []),
    ({"type": "array", "prefixItems": [INT], "unevaluatedItems": False}, ["[1]"],
     ["[1, 1]"]),
    (LIST | {"minItems": "1", "maxItems": 2.0}, ["[1]"], ["[]", "[1, 1, 1]"]),
    (LIST | {"maxItems": 2**63 - 1}, ["[1]"], []),
    (TEXT | {"maxLength": 2**63 - 1}, ['"x"'], []),
    (MAP | {"propertyNames": {"enum": ["a", "b"]}, "required": ["a"]},
     ['{"a": 1}', '{"a": 1, "b": 1}'], ["{}", '{"c": 1}']),
    ({"type": "object", "propertyNames": {"const": "a"}, "additionalProperties": A},
     ['{"a": {"a": "x"}}'], ['{"b": {}}']),
    (MAP | {"propertyNames": {"$ref": "#/$defs/N"}, "$defs": {"N": {"enum": ["n"]}}},
     ['{"n": 1}'], ['{"m": 1}']),
    (MAP | {"propertyNames": {"pattern": "^[a-z]+$"}}, ['{"a": 1}'], ['{"A": 1}']),
    (MAP | {"propertyNames": {"minLength": 1, "maxLength": 2}}, ['{"a": 1}'],
     ['{"": 1}', '{"abc": 1}']),
    (MAP | {"propertyNames": {"format": "date"}}, ['{"2024-12-31": 1}'],
     ['{"2024-02-30": 1}', '{"a": 1}']),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 1},
     ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'], ["{}"]),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 2},
     ['{"a": 1, "b": 1}'], ['{"a": 1}']),
    # Described nowhere, and required: pydantic's aliases, written by hand.
    (A | {"required": ["b"]}, ['{"b": [1]}'], ['{"a": "x"}']),
    ({"properties": {"a": {"type": "string", "required": True}}}, ['{"a": "x"}'],
     ["{}"]),
    ({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}, ['{"a": "x"}'],
     ['{"a": 1}']),
    ({"type": "any"}, ["1", "{}"], []),
    ({"type": ["string", "null"], "not": {"type": "null"}}, ['"x"'], ["null"]),
    ({"not": {"type": ["object", "array"]}}, ["1", '"x"', "null"], ["{}", "[]"]),
    (INT | {"minimum": -(2**63), "maximum": 2**63 - 1}, ["-5", "5"], []),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 3.4e38},
     ["-1.5", "2"], []),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
    ({"$ref": "#/$defs/List<A b>", "$defs": {"List<A b>": LIST}}, ["[1]"], ["{}"]),
    ({"$recursiveRef": "#/$defs/L", "$defs": {"L": LIST}}, ["[1]"], ["{}"]),
    # Recursion through a property or an item.
    ({"$ref": "#/$defs/N", "$defs": {"N": {"properties": {
        "n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}, "type": "object"}}},
     ['{"n": {"n": null}}'], ['{"n": 1}']),
    ({"type": "array", "items": {"$ref": "#"}}, ["[[], [[]]]"], ["[1]"]),
    (TEXT | {"pattern": DECIMAL + r"\d*\.?\d*$"},
     ['"1.5"', '"-.5"', '"0"'], ['"-"', '"."', '""', '"1.5.0"']),
    (TEXT | {"pattern": DECIMAL + r"\d*\.?\d{0,2}0*$"}, ['"1.25"'], ['"1.255"']),
    (TEXT | {"pattern": DECIMAL
             + r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"},
     ['"123.45"', '"1.500"'], ['"1234.5"', '"+"']),
    # Of zod's email().
    (TEXT | {"format": "email", "pattern":
             r"^(?!\.)(?!.*\.\.)([\w'+\-\.]*)[\w+-]@([A-Za-z0-9][\w\-]*\.)+[A-Za-z]{2,}$"},
     ['"a.b@c.de"'], ['".a@c.de"', '"a..b@c.de"']),
    (TEXT | {"pattern": r"^[[a]\/{b}$"}, ['"[/{b}"'], ['"b/{b}"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "possible", "impossible"), SERVED)
def test_said_in_other_words(
    schema: Any,
    possible: list[str],
    impossible: list[str],
    backend: LLGuidanceBackend,
    tokenizer: Tokenizer,
) -> None:
    for text in possible:
        assert follows(backend, tokenizer, schema, text), text
    for text in impossible:
        assert not follows(backend, tokenizer, schema, text), text


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (LIST | {"uniqueItems": True}, "uniqueItems: true"),
        (LIST | {"contains": {"const": 9}}, "contains: "),
        ({"not": {}}, "not: "),
        ({"properties": {"a": {"not": {"const": 1}}}}, "properties.a.not: "),
        (A | {"if": A, "then": {"required": ["a"]}}, "if: "),
        (A | {"dependentRequired": {"a": ["b"]}}, "dependentRequired: "),
        (A | {"dependencies": {"a": ["b"]}}, "dependencies: "),
        (A | {"dependentSchemas": {"a": A}}, "dependentSchemas: "),
        (A | {"propertyNames": {"pattern": "^x"}}, "propertyNames: "),
        ({"type": "object", "propertyNames": INT}, "propertyNames: "),
        ({"allOf": [A, A], "unevaluatedProperties": False}, "unevaluatedProperties: "),
        ({"$dynamicRef": "#node"}, "$dynamicRef: "),
        ({"type": "float"}, 'type: "float"'),
        ({"type": "array", "minItems": -1}, "minItems: -1"),
        ({"type": "number", "maximum": "3"}, 'maximum: "3"'),
        (A | {"required": "a"}, 'required: "a"'),
        ({"items": {"anyOf": []}}, "items.anyOf: []"),
        ({"enum": []}, "enum: []"),
        ({"properties": {"a": "string"}}, "properties.a must be a schema"),
        ({"properties": {"a b": {"anyOf": [3]}}}, "properties.'a b'.anyOf[0] must be"),
        ({"items": {"$ref": "#/$defs/B"}}, 'items.$ref: "#/$defs/B" names nothing'),
        (TEXT | {"pattern": r"^a(?=b)c"}, "pattern: "),
        (TEXT | {"pattern": r"\bfoo\b"}, "a word boundary"),
        (TEXT | {"pattern": r"^(a)\1$"}, "a backreference"),
        ({"$ref": "#/$defs/L", "$defs": {"L": {"items": {"pattern": "(?<=a)b"}}}},
         "$defs.L.items.pattern: "),
    ],
)  # fmt: skip
def test_refused_with_the_path(schema: Any, where: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        read_schema(schema)
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "way"),
    [
        ({"properties": {"a": {"$ref": "#/properties/a"}}},
         "properties.a -> properties.a"),
        ({"$ref": "#"}, "the schema -> the schema"),
        ({"allOf": [{"$ref": "#"}]}, "the schema -> allOf[0] -> the schema"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
          "items": {"$ref": "#/$defs/a"}}, "$defs.a -> $defs.b -> $defs.a"),
        ({"$defs": {"a": {"anyOf": [{"type": "null"}, {"oneOf": [{"$ref": "#/$defs/a"}]}
                                    ]}}, "$ref": "#/$defs/a"},
         "$defs.a -> $defs.a.anyOf[1] -> $defs.a.anyOf[1].oneOf[0] -> $defs.a"),
    ],
)  # fmt: skip
def test_a_cycle_is_named(schema: Any, way: str) -> None:
    with pytest.raises(ValueError, match="refers to itself") as caught:
        read_schema(schema)
    assert str(caught.value).endswith(way)


def test_a_fault_of_one_definition_names_it(backend: LLGuidanceBackend) -> None:
    defs = {"ok": TEXT, "bad": TEXT | {"pattern": "("}}
    schema = {"$defs": defs, "type": "array", "items": {"$ref": "#/$defs/bad"}}
    with pytest.raises(ValueError, match=r"invalid json_schema: \$defs\.bad: "):
        backend.compile("json_schema", json.dumps(schema))


def test_hostile_schemas_cost_linear_time() -> None:
    """Each would be minutes, or gigabytes, with a copy or a search per element."""
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(8000)}
    nested: Any = INT
    for _ in range(20):
        names = {"enum": [f"n{i}" for i in range(40)]}
        nested = {"propertyNames": names, "additionalProperties": nested}
    deep: Any = {f"p{i}": {} for i in range(20_000)}
    for i in range(25):
        deep = {("x" * 60) + str(i): {"properties": deep}}
    started = time.monotonic()
    read_schema({"$defs": chain | {"d8000": INT}, "$ref": "#/$defs/d0"})
    read_schema(nested)
    assert len(json.dumps(nested)) < 200_000
    read_schema({"properties": deep})
    for pattern in ("(?!" + "(|a)" * 60 + ")", "[\\]" * 60_000, "(?=" * 60 + ")" * 60):
        with pytest.raises(ValueError, match="pattern"):
            read_schema(TEXT | {"pattern": pattern})
    assert time.monotonic() - started < 30


VALUES = [None, True, False, 0, 1, -1, 3.5, float("inf"), 2**70, "", "a", "string"]
VALUES += ["#", "#/", "#/$defs/a", "uuid", "^(?!a)", "(", "[", "\ud800", "%zz", "date"]
KEYWORDS = [*sorted({word for word, _ in RULES}), "$defs", "const", "items"]


def test_no_schema_is_more_than_a_value_error() -> None:
    rng = random.Random(5)

    def value(depth: int) -> Any:
        kind = rng.randrange(4) if depth else 0
        if kind == 1:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        if kind == 2:
            names = rng.choices(["a", "b", "", "type"], k=rng.randrange(3))
            return {name: value(depth - 1) for name in names}
        return schema(depth - 1) if kind == 3 else rng.choice(VALUES)

    def schema(depth: int) -> Any:
        words = rng.choices(KEYWORDS, k=rng.randrange(5))
        return {word: value(depth) for word in words}

    for _ in range(count(ci=10_000, full=200_000)):
        given = schema(3)
        close_objects(given)
        with suppress(ValueError):
            read_schema(given)
        json.dumps(given)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
