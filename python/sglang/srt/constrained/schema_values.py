"""Rules for keywords about single values and lists."""

from __future__ import annotations

from typing import Any

from sglang.srt.constrained.pattern_rewriting import LookAroundError, rewrite_pattern
from sglang.srt.constrained.schema_places import PARTS, SchemaPlace
from sglang.srt.constrained.schema_rules import (
    TYPES,
    Rule,
    Schema,
    is_anything,
    refused,
)

# Any other format is an annotation, as in the standard.
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname"}
    | {"ipv4", "ipv6", "uuid", "uri"}
)
# Limits beyond these make llguidance fail, so they are moved to these.
_MAX_LIMIT = 9 * 10**18
_MAX_COUNT = 2**31 - 1


def type_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    given = value if isinstance(value, list) else [value]
    names = [one.lower() if isinstance(one, str) else one for one in given]
    if "any" in names:
        return True
    for name in names:
        if name not in TYPES:
            raise refused("type", value, f"use one of {', '.join(TYPES)}")
    schema["type"] = list(dict.fromkeys(names)) if isinstance(value, list) else names[0]
    return False


def count_rule(keyword: str) -> Rule:
    """Check a count, which some generators write as a string or as 1.0."""

    def rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
        count = value
        if isinstance(value, str) and value.isdecimal() and len(value) < 20:
            count = int(value)
        if isinstance(value, float) and value.is_integer():
            count = int(value)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise refused(keyword, value, "it must be an integer, at least 0")
        schema[keyword] = min(count, _MAX_COUNT)
        return False

    return rule


def limit_rule(keyword: str, sign: int) -> Rule:
    """Handle limits of language types, such as -(2**63) or 1.8e308."""

    def rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            return False  # draft 4
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(keyword, value, "it must be a number")
        if sign * value > _MAX_LIMIT:
            schema[keyword] = sign * _MAX_LIMIT
        return False

    return rule


def format_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    return is_annotation(value)


def is_annotation(name: Any) -> bool:
    return not isinstance(name, str) or name not in FORMATS


def pattern_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    if not isinstance(value, str):
        raise refused("pattern", value, "it must be a regular expression")
    try:
        first, *others = rewrite_pattern(value)
    except LookAroundError as error:
        raise refused(
            "pattern",
            value,
            f"it has {error}; write what the text looks like without it, or use "
            "minLength, maxLength, format or enum",
        ) from error
    schema["pattern"] = first
    if others:
        parts = schema.get("allOf")
        schema["allOf"] = [
            *(parts if isinstance(parts, list) else []),
            *({"pattern": pattern} for pattern in others),
        ]
    return False


def unique_items_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    most = schema.get("maxItems")
    if value is False or (isinstance(most, int) and most <= 1):
        return True
    raise refused(
        "uniqueItems",
        value,
        "items cannot be compared while they are written; leave it out and remove "
        "doubles from the answer",
    )


def contains_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if least == 0 and most is None:
        return True
    if not (is_anything(value) or value == schema.get("items")):
        raise refused("contains", value, "describe the items with items or prefixItems")
    schema["minItems"] = max(least, schema.get("minItems", 0))
    if most is not None:
        schema["maxItems"] = min(most, schema.get("maxItems", most))
    return True


def unevaluated_items_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    if is_anything(value) or (
        "items" in schema and not isinstance(schema["items"], list)
    ):
        return True
    if {"$ref", "if", "contains", *PARTS} & schema.keys():
        raise refused(
            "unevaluatedItems",
            value,
            "beside $ref, allOf, anyOf or oneOf; use items after prefixItems",
        )
    schema["additionalItems" if "items" in schema else "items"] = value
    return True
