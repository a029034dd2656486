"""Shared code of the rules for JSON schema keywords.

A rule gets the schema, the keyword's value and the schema's place. It changes the
schema in place, and returns whether to remove the keyword, because it has no effect or
was rewritten to other keywords. Schemas are never copied, because a client could make
the copies grow exponentially.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sglang.srt.constrained.schema_places import SchemaPlace

Schema = dict[str, Any]
Rule = Callable[[Schema, Any, SchemaPlace], bool]

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
# Keywords that may reject a value; all others are annotations.
ASSERTIONS = frozenset(
    [
        "$dynamicRef",
        "$recursiveRef",
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
        "items",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "not",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "then",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    ]
)


class UnservedError(ValueError):
    """A keyword that cannot be enforced; `keyword` is its name."""

    def __init__(self, keyword: str, message: str) -> None:
        super().__init__(message)
        self.keyword = keyword


def is_anything(schema: Any) -> bool:
    """Whether every value satisfies `schema`."""
    if isinstance(schema, dict):
        return not (ASSERTIONS & schema.keys())
    return schema is True


def schema_types(schema: Schema, default: list[str]) -> list[Any]:
    kinds = schema.get("type")
    if kinds is None:
        return default
    return kinds if isinstance(kinds, list) else [kinds]


def refused(keyword: str, value: Any, why: str) -> UnservedError:
    shown = json.dumps(value, ensure_ascii=False)
    shown = shown if len(shown) <= 80 else f"{shown[:76]} ..."
    return UnservedError(keyword, f"{shown} is not supported: {why}")
