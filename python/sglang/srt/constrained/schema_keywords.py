"""What is done with each keyword of a JSON schema that llguidance does not read, or
reads in another way than generators write it.

A rule gets the schema, the keyword's value and the schema's place. It changes the
schema in place, and returns whether the keyword has to go: it asks for nothing, or the
rule has said it in other keywords. No schema is copied: a client could make the copies
grow exponentially.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

from sglang.srt.constrained.pattern_rewriting import LookAroundError, rewrite_pattern
from sglang.srt.constrained.schema_places import PARTS, Place

Schema = dict[str, Any]
Rule = Callable[[Schema, Any, Place], bool]

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
# Any other format is an annotation, as the standard has it.
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname"}
    | {"ipv4", "ipv6", "uuid", "uri"}
)
# Limits that are further away are moved to these: beyond them llguidance fails.
_MAX_LIMIT = 9 * 10**18
_MAX_COUNT = 2**31 - 1
_MAX_ALTERNATIVES = 32
# Keywords for which null is a value like any other.
_VALUES = ("const", "default")
_FORMAT_PATTERNS = {
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "date": r"^\d{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)$",
}


class UnservedError(ValueError):
    """A keyword that cannot be kept; `keyword` is its name."""

    def __init__(self, keyword: str, message: str) -> None:
        super().__init__(message)
        self.keyword = keyword


def read_keywords(schema: Schema, place: Place) -> None:
    """Rewrite the keywords of one schema, in place.

    Raises:
        UnservedError: one asks for what cannot be kept.
    """
    for keyword in [k for k, v in schema.items() if v is None and k not in _VALUES]:
        # Serialised classes write every field that they have.
        del schema[keyword]
    for keyword, rule in RULES:
        if keyword in schema and rule(schema, schema[keyword], place):
            del schema[keyword]


def _is_anything(schema: Any) -> bool:
    """Whether every value satisfies `schema`."""
    if isinstance(schema, dict):
        return not (_ASSERTIONS & schema.keys())
    return schema is True


def _refuse(keyword: str, value: Any, why: str) -> UnservedError:
    shown = json.dumps(value, ensure_ascii=False)
    shown = shown if len(shown) <= 80 else f"{shown[:76]} ..."
    return UnservedError(keyword, f"{shown} is not supported: {why}")


def _dependent(keyword: str) -> Rule:
    """What a property asks for where it is present; kept where it is so anyway."""

    def rule(schema: Schema, value: Any, place: Place) -> bool:
        required = schema.get("required") or []
        asked = value.values() if isinstance(value, dict) else [value]
        for one in asked:
            is_met = isinstance(one, list) and all(name in required for name in one)
            if not is_met and not _is_anything(one):
                raise _refuse(keyword, value, "use required, or anyOf for each case")
        return True

    return rule


def _drop(schema: Schema, value: Any, place: Place) -> bool:
    return True


# -- types and numbers -----------------------------------------------------------------


def _type(schema: Schema, value: Any, place: Place) -> bool:
    given = value if isinstance(value, list) else [value]
    names = [one.lower() if isinstance(one, str) else one for one in given]
    if "any" in names:
        return True
    for name in names:
        if name not in TYPES:
            raise _refuse("type", value, f"use one of {', '.join(TYPES)}")
    schema["type"] = list(dict.fromkeys(names)) if isinstance(value, list) else names[0]
    return False


def _count(keyword: str) -> Rule:
    """A number of things; some generators write it as a text or as 1.0."""

    def rule(schema: Schema, value: Any, place: Place) -> bool:
        count = value
        if isinstance(value, str) and value.isdecimal() and len(value) < 20:
            count = int(value)
        if isinstance(value, float) and value.is_integer():
            count = int(value)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise _refuse(keyword, value, "it must be an integer, at least 0")
        schema[keyword] = min(count, _MAX_COUNT)
        return False

    return rule


def _limit(keyword: str, sign: int) -> Rule:
    """A limit that the type of a language has, such as -(2**63) or 1.8e308."""

    def rule(schema: Schema, value: Any, place: Place) -> bool:
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            return False  # draft 4
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refuse(keyword, value, "it must be a number")
        if sign * value > _MAX_LIMIT:
            schema[keyword] = sign * _MAX_LIMIT
        return False

    return rule


def _boolean_required(schema: Schema, value: Any, place: Place) -> bool:
    """Draft 3 says `required` in the property; `_properties` has read it."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return False
    if isinstance(value, bool):
        return True
    raise _refuse("required", value, "it must be a list of property names")


# -- texts -----------------------------------------------------------------------------


def _format(schema: Schema, value: Any, place: Place) -> bool:
    return _is_annotation(value)


def _is_annotation(name: Any) -> bool:
    return not isinstance(name, str) or name not in FORMATS


def _pattern(schema: Schema, value: Any, place: Place) -> bool:
    if not isinstance(value, str):
        raise _refuse("pattern", value, "it must be a regular expression")
    try:
        first, *others = rewrite_pattern(value)
    except LookAroundError as error:
        raise _refuse(
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


# -- objects ---------------------------------------------------------------------------


def _properties(schema: Schema, value: Any, place: Place) -> bool:
    if not isinstance(value, dict):
        raise _refuse("properties", value, "it must map names to schemas")
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


def _property_names(schema: Schema, value: Any, place: Place) -> bool:
    names = value
    if isinstance(value, dict) and set(value) & _ASSERTIONS == {"$ref"}:
        names = place.resolve(value["$ref"])
    if _is_true_of_texts(names):
        return True
    if not isinstance(names, dict):
        raise _refuse("propertyNames", value, "no property could be written")
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
        raise _refuse(
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
        for key in _ASSERTIONS & schema.keys()
        if key != "type" and not (key in neutral and schema[key] == neutral[key])
    }
    if rest == {"format"} and _is_annotation(schema["format"]):
        rest = set()
    return not rest and "string" in _types(schema, ["string"])


def _types(schema: Schema, default: list[str]) -> list[Any]:
    kinds = schema.get("type")
    if kinds is None:
        return default
    return kinds if isinstance(kinds, list) else [kinds]


def _name_pattern(names: Schema) -> str | None:
    """The one pattern that names must match; None: it is not one."""
    if "string" not in _types(names, ["string"]):
        return None
    asked = _ASSERTIONS & names.keys() - {"type"}
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


def _min_properties(schema: Schema, value: Any, place: Place) -> bool:
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
    raise _refuse(
        "minProperties",
        value,
        f"of {len(optional)} optional properties one more than the required ones can "
        "be asked for, or all",
    )


def _max_properties(schema: Schema, value: Any, place: Place) -> bool:
    properties = schema.get("properties") or {}
    is_closed = schema.get("additionalProperties") is False
    if is_closed and not schema.get("patternProperties"):
        return bool(value >= len(properties))
    return False


def _unevaluated_properties(schema: Schema, value: Any, place: Place) -> bool:
    if _is_anything(value):
        return True
    if {"$ref", "if", *PARTS} & schema.keys():
        raise _refuse(
            "unevaluatedProperties",
            value,
            "beside $ref, allOf, anyOf or oneOf; declare all properties in one object "
            "and use additionalProperties",
        )
    schema.setdefault("additionalProperties", value)
    return True


# -- lists -----------------------------------------------------------------------------


def _unique_items(schema: Schema, value: Any, place: Place) -> bool:
    most = schema.get("maxItems")
    if value is False or (isinstance(most, int) and most <= 1):
        return True
    raise _refuse(
        "uniqueItems",
        value,
        "items cannot be compared while they are written; leave it out and remove "
        "doubles from the answer",
    )


def _contains(schema: Schema, value: Any, place: Place) -> bool:
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if least == 0 and most is None:
        return True
    if not (_is_anything(value) or value == schema.get("items")):
        raise _refuse("contains", value, "describe the items with items or prefixItems")
    schema["minItems"] = max(least, schema.get("minItems", 0))
    if most is not None:
        schema["maxItems"] = min(most, schema.get("maxItems", most))
    return True


def _unevaluated_items(schema: Schema, value: Any, place: Place) -> bool:
    if _is_anything(value) or (
        "items" in schema and not isinstance(schema["items"], list)
    ):
        return True
    if {"$ref", "if", "contains", *PARTS} & schema.keys():
        raise _refuse(
            "unevaluatedItems",
            value,
            "beside $ref, allOf, anyOf or oneOf; use items after prefixItems",
        )
    schema["additionalItems" if "items" in schema else "items"] = value
    return True


# -- combinations ----------------------------------------------------------------------


def _not(schema: Schema, value: Any, place: Place) -> bool:
    if value is False:
        return True
    if _is_anything(value):
        raise _refuse("not", value, "no value satisfies it")
    if isinstance(value, dict) and _ASSERTIONS & value.keys() == {"type"}:
        other = _types(value, [])
        given = _types(schema, [one for one in TYPES if one != "integer"])
        if "integer" not in other or "number" in other or "number" not in given:
            refused = [*other, *(["integer"] if "number" in other else [])]
            left = [one for one in given if one not in refused]
            if left:
                schema["type"] = left
                return True
    raise _refuse("not", value, "say what a value is, not what it is not")


def _if(schema: Schema, value: Any, place: Place) -> bool:
    truth = _truth(value)
    chosen = None if truth is None else ("then" if truth else "else")
    branches = [name for name in ("then", "else") if name in schema]
    if chosen is not None:
        branches = [name for name in branches if name == chosen]
    asking = [name for name in branches if not _is_anything(schema[name])]
    if asking and chosen is None:
        raise _refuse("if", value, "write each case as an entry of anyOf")
    for name in asking:
        schema.setdefault("allOf", []).append(schema[name])
    return True


def _truth(schema: Any) -> bool | None:
    if schema is False:
        return False
    return True if _is_anything(schema) else None


def _parts(keyword: str) -> Rule:
    """A list of schemas, at least one: none of no alternatives can be chosen."""

    def rule(schema: Schema, value: Any, place: Place) -> bool:
        if isinstance(value, list) and (value or keyword == "allOf"):
            return False
        raise _refuse(keyword, value, "it must be a list that is not empty")

    return rule


def _reference(schema: Schema, value: Any, place: Place) -> bool:
    """Names of generics have characters that a reference must have encoded."""
    if isinstance(value, str) and value.startswith("#/"):
        schema["$ref"] = "#" + quote(unquote(value[1:]), safe="/~$")
    return False


def _root_reference(keyword: str) -> Rule:
    """A reference that depends on who refers, which the root settles here."""

    def rule(schema: Schema, value: Any, place: Place) -> bool:
        is_pointer = isinstance(value, str) and (value == "#" or value[:2] == "#/")
        if not is_pointer or "$ref" in schema:
            raise _refuse(keyword, value, "use $ref with a pointer: #/$defs/name")
        schema["$ref"] = value
        return True

    return rule


# In the order in which they are applied.
RULES: tuple[tuple[str, Rule], ...] = (
    ("$schema", _drop),
    ("$vocabulary", _drop),
    ("$dynamicAnchor", _drop),
    ("$recursiveAnchor", _drop),
    ("$dynamicRef", _root_reference("$dynamicRef")),
    ("$recursiveRef", _root_reference("$recursiveRef")),
    ("$ref", _reference),
    ("type", _type),
    ("enum", _parts("enum")),
    ("anyOf", _parts("anyOf")),
    ("oneOf", _parts("oneOf")),
    ("allOf", _parts("allOf")),
    *(
        (f"{end}{what}", _count(f"{end}{what}"))
        for end in ("min", "max")
        for what in ("Items", "Length", "Properties", "Contains")
    ),
    ("minimum", _limit("minimum", -1)),
    ("exclusiveMinimum", _limit("exclusiveMinimum", -1)),
    ("maximum", _limit("maximum", 1)),
    ("exclusiveMaximum", _limit("exclusiveMaximum", 1)),
    ("not", _not),
    ("if", _if),
    ("then", _drop),
    ("else", _drop),
    ("format", _format),
    ("pattern", _pattern),
    ("properties", _properties),
    ("required", _boolean_required),
    ("propertyNames", _property_names),
    ("unevaluatedProperties", _unevaluated_properties),
    ("dependentRequired", _dependent("dependentRequired")),
    ("dependentSchemas", _dependent("dependentSchemas")),
    ("dependencies", _dependent("dependencies")),
    ("minProperties", _min_properties),
    ("maxProperties", _max_properties),
    ("uniqueItems", _unique_items),
    ("unevaluatedItems", _unevaluated_items),
    ("contains", _contains),
    ("minContains", _drop),
    ("maxContains", _drop),
)

# Keywords that may refuse a value; all others are annotations.
_ASSERTIONS = (
    {keyword for keyword, _ in RULES}
    - {"$schema", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor"}
) | {"additionalItems", "additionalProperties", "const", "items", "multipleOf"}
_ASSERTIONS |= {"patternProperties", "prefixItems"}
