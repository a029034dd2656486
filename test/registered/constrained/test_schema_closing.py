"""Objects of JSON schemas: declared properties only, unless the schema says more."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
from tokenizers import Tokenizer

from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.constrained.schema_closing import close_objects
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

VOCAB_SIZE = 421
INT = {"type": "integer"}
A = {"type": "object", "properties": {"a": INT}}
B = {"type": "object", "properties": {"b": INT}}
CLOSED_A = A | {"additionalProperties": False}
CLOSED_B = B | {"additionalProperties": False}
REF = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED_A),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"prefixItems": [A, B]}, {"prefixItems": [CLOSED_A, CLOSED_B]}),
        ({"anyOf": [A, B, {"type": "null"}]},
         {"anyOf": [CLOSED_A, CLOSED_B, {"type": "null"}]}),
        ({"properties": {"x": A}},
         {"properties": {"x": CLOSED_A}, "additionalProperties": False}),
        ({"$defs": {"A": A}, "anyOf": [REF, {"type": "null"}]},
         {"$defs": {"A": CLOSED_A}, "anyOf": [REF, {"type": "null"}]}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED_A}),
        # One part is the whole object, as pydantic writes a field with a default.
        ({"$defs": {"A": A}, "allOf": [REF], "default": {}},
         {"$defs": {"A": CLOSED_A}, "allOf": [REF], "default": {}}),
        # Alternatives that only require.
        (A | {"anyOf": [{"required": ["a"]}]},
         CLOSED_A | {"anyOf": [{"required": ["a"]}]}),
        # A list of itself.
        ({"$defs": {"A": A | {"properties": {"next": REF}}}, **REF},
         {"$defs": {"A": CLOSED_A | {"properties": {"next": REF}}}, **REF}),
        # An object in a place of one part.
        ({"allOf": [A, {"properties": {"x": B}}]},
         {"allOf": [A, {"properties": {"x": CLOSED_B}}]}),
    ],
)  # fmt: skip
def test_closed(schema: Any, closed: Any) -> None:
    given = copy.deepcopy(schema)
    assert close_objects(given)
    assert given == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": INT},
        A | {"additionalProperties": True},
        A | {"additionalProperties": INT},
        A | {"unevaluatedProperties": True},
        {"type": "object", "patternProperties": {"^x": INT}},
        {"allOf": [A, B]},
        {"allOf": [{"allOf": [A]}, {"anyOf": [B, {"type": "object"}]}]},
        A | {"anyOf": [B, {"required": ["a"]}]},
        {"$defs": {"A": A, "B": {"anyOf": [REF]}}, **B, "$ref": "#/$defs/B"},
        {"$defs": {"A": A}, "allOf": [REF, B]},
        A | {"$ref": "elsewhere.json"},
        {"const": A, "enum": [A], "default": A, "examples": [A]},
        {"not": A},
        True,
        {"properties": 3},
        {"allOf": 3, "anyOf": {}, "$ref": 4, "items": [3, None]},
    ],
)
def test_left_as_written(schema: Any) -> None:
    given = copy.deepcopy(schema)
    assert not close_objects(given)
    assert given == schema


def test_hostile_schemas_cost_linear_time() -> None:
    chain: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}], "allOf": [{}]}
        for i in range(4000)
    }
    chain["d4000"] = {"allOf": [{"$ref": "#/$defs/d0"}, A]}
    started = time.monotonic()
    assert not close_objects({"$defs": chain, "$ref": "#/$defs/d0", **B})
    # Each definition against all others would be minutes.
    assert time.monotonic() - started < 10


def follows(backend: LLGuidanceBackend, tokenizer: Tokenizer, text: str) -> bool:
    grammar = backend.compile("json_schema", json.dumps(A))
    for token in tokenizer.encode(text).ids:
        try:
            grammar.accept(token)
        except RuntimeError:
            return False
    return grammar.is_terminated()


def test_the_flag(backend: LLGuidanceBackend, tokenizer: Tokenizer) -> None:
    open_backend = LLGuidanceBackend(
        tokenizer.to_str(),
        vocab_size=VOCAB_SIZE,
        eos_ids=[0],
        allow_additional_properties=True,
    )
    try:
        for text, with_flag, usual in (
            ('{"a": 1}', True, True),
            ('{"a": 1, "b": 2}', True, False),
        ):
            assert follows(backend, tokenizer, text) is usual
            assert follows(open_backend, tokenizer, text) is with_flag
    finally:
        open_backend.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
