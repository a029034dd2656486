"""Rules for keywords about objects."""

from __future__ import annotations

from typing import Any

from sglang.srt.constrained.pattern_rewriting import LookAroundError, rewrite_pattern
from sglang.srt.constrained.schema_places import PARTS, SchemaPlace
from sglang.srt.constrained.schema_rules import (
    ASSERTIONS,
    Rule,
    Schema,
    is_anything,
    refused,
    schema_types,
)
from sglang.srt.constrained.schema_values import is_annotation

_MAX_ALTERNATIVES = 32
_FORMAT_PATTERNS = {
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "date": r"^\d{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)$",
}


def properties_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    if not isinstance(value, dict):
        raise refused("properties", value, "it must map names to schemas")
    needed = [
        name
        for name, part in value.items()
        if isinstance(part, dict) and part.get("required") is True
    ]
    if needed:
        given = schema.get("required")
        names = given if isinstance(given, list) else []
        schema["required"] = list(dict.fromkeys([*names, *needed]))
    return False


def property_names_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    names = value
    if isinstance(value, dict) and set(value) & ASSERTIONS == {"$ref"}:
        names = place.resolve(value["$ref"])
    if _is_true_of_texts(names):
        return True
    if not isinstance(names, dict):
        raise refused("propertyNames", value, "no property could be written")
    values = schema.get("additionalProperties", True)
    allowed = [names["const"]] if "const" in names else names.get("enum")
    has_own = schema.get("properties") or schema.get("patternProperties")
    if isinstance(allowed, list) and all(isinstance(name, str) for name in allowed):
        if has_own and values is False and not schema.get("patternProperties"):
            if set(schema["properties"]) <= set(allowed):
                return True
        elif not has_own:
            schema["properties"] = dict.fromkeys(allowed, values)
            if isinstance(values, dict) and allowed:
                again = {"$ref": place.pointer("properties", allowed[0])}
                schema["properties"] = dict.fromkeys(allowed, again)
                schema["properties"][allowed[0]] = values
            schema["additionalProperties"] = False
            return True
    pattern = _name_pattern(names)
    if pattern is None or has_own:
        raise refused(
            "propertyNames",
            value,
            "names can be an enum, or have one pattern or a length, in an object "
            "without properties of its own",
        )
    schema["patternProperties"] = {pattern: values}
    schema["additionalProperties"] = False
    return True


def _is_true_of_texts(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    neutral = {"minLength": 0, "minProperties": 0, "uniqueItems": False}
    rest = {
        key
        for key in ASSERTIONS & schema.keys()
        if key != "type" and not (key in neutral and schema[key] == neutral[key])
    }
    if rest == {"format"} and is_annotation(schema["format"]):
        rest = set()
    return not rest and "string" in schema_types(schema, ["string"])


def _name_pattern(names: Schema) -> str | None:
    """Return the single pattern that names must match, or None if there is none."""
    if "string" not in schema_types(names, ["string"]):
        return None
    asked = ASSERTIONS & names.keys() - {"type"}
    if asked <= {"pattern", "format"} and isinstance(names.get("pattern"), str):
        try:
            patterns = rewrite_pattern(names["pattern"])
        except LookAroundError:
            return None
        return patterns[0] if len(patterns) == 1 else None
    if asked == {"format"} and isinstance(names["format"], str):
        return _FORMAT_PATTERNS.get(names["format"])
    if asked <= {"minLength", "maxLength"}:
        low, high = names.get("minLength", 0), names.get("maxLength", "")
        if isinstance(low, int) and (high == "" or isinstance(high, int)):
            return rf"^[\s\S]{{{low},{high}}}$"
    return None


def min_properties_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    required = schema.get("required") or []
    properties = schema.get("properties") or {}
    optional = [name for name in properties if name not in required]
    if value <= len(required):
        return True
    is_closed = schema.get("additionalProperties") is False
    if not optional or not is_closed or schema.get("patternProperties"):
        return False
    if value == len(required) + len(optional):
        schema["required"] = [*required, *optional]
        return True
    if value == len(required) + 1 and len(optional) <= _MAX_ALTERNATIVES:
        schema.setdefault("allOf", []).append(
            {"anyOf": [{"required": [name]} for name in optional]}
        )
        return True
    raise refused(
        "minProperties",
        value,
        f"of {len(optional)} optional properties one more than the required ones can "
        "be asked for, or all",
    )


def max_properties_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    properties = schema.get("properties") or {}
    is_closed = schema.get("additionalProperties") is False
    if is_closed and not schema.get("patternProperties"):
        return bool(value >= len(properties))
    return False


def unevaluated_properties_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    if is_anything(value):
        return True
    if {"$ref", "if", *PARTS} & schema.keys():
        raise refused(
            "unevaluatedProperties",
            value,
            "beside $ref, allOf, anyOf or oneOf; declare all properties in one object "
            "and use additionalProperties",
        )
    schema.setdefault("additionalProperties", value)
    return True


def required_rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    """In draft 3, `required` is in the property; `properties_rule` has read it."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return False
    if isinstance(value, bool):
        return True
    raise refused("required", value, "it must be a list of property names")


def dependent_rule(keyword: str) -> Rule:
    """Handle what a present property requires; accepted if it holds anyway."""

    def rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
        required = schema.get("required") or []
        asked = value.values() if isinstance(value, dict) else [value]
        for one in asked:
            is_met = isinstance(one, list) and all(name in required for name in one)
            if not is_met and not is_anything(one):
                raise refused(keyword, value, "use required, or anyOf for each case")
        return True

    return rule
