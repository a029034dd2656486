"""Rules for JSON schema keywords that llguidance does not read, or reads differently
from what generators mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from sglang.srt.constrained.schema_objects import (
    dependent_rule,
    max_properties_rule,
    min_properties_rule,
    properties_rule,
    property_names_rule,
    required_rule,
    unevaluated_properties_rule,
)
from sglang.srt.constrained.schema_rules import (
    ASSERTIONS,
    TYPES,
    Rule,
    Schema,
    is_anything,
    refused,
    schema_types,
)
from sglang.srt.constrained.schema_values import (
    contains_rule,
    count_rule,
    format_rule,
    limit_rule,
    pattern_rule,
    type_rule,
    unevaluated_items_rule,
    unique_items_rule,
)

if TYPE_CHECKING:
    from sglang.srt.constrained.schema_places import SchemaPlace

# Keywords for which null is an ordinary value.
_VALUES = ("const", "default")


def read_keywords(schema: Schema, place: SchemaPlace) -> None:
    """Rewrite the keywords of one schema, in place.

    Raises:
        UnservedError: a keyword asks for something that cannot be enforced.
    """
    for keyword in [k for k, v in schema.items() if v is None and k not in _VALUES]:
        # Serialized classes write all their fields.
        del schema[keyword]
    for keyword, rule in RULES:
        if keyword in schema and rule(schema, schema[keyword], place):
            del schema[keyword]


def _not(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    if value is False:
        return True
    if is_anything(value):
        raise refused("not", value, "no value satisfies it")
    if isinstance(value, dict) and ASSERTIONS & value.keys() == {"type"}:
        other = schema_types(value, [])
        given = schema_types(schema, [one for one in TYPES if one != "integer"])
        if "integer" not in other or "number" in other or "number" not in given:
            excluded = [*other, *(["integer"] if "number" in other else [])]
            left = [one for one in given if one not in excluded]
            if left:
                schema["type"] = left
                return True
    raise refused("not", value, "say what a value is, not what it is not")


def _if(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    truth = _truth(value)
    chosen = None if truth is None else ("then" if truth else "else")
    branches = [name for name in ("then", "else") if name in schema]
    if chosen is not None:
        branches = [name for name in branches if name == chosen]
    asking = [name for name in branches if not is_anything(schema[name])]
    if asking and chosen is None:
        raise refused("if", value, "write each case as an entry of anyOf")
    for name in asking:
        schema.setdefault("allOf", []).append(schema[name])
    return True


def _truth(schema: Any) -> bool | None:
    if schema is False:
        return False
    return True if is_anything(schema) else None


def _parts(keyword: str) -> Rule:
    """Check for a non-empty list of schemas: there must be an alternative to choose."""

    def rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
        if isinstance(value, list) and (value or keyword == "allOf"):
            return False
        raise refused(keyword, value, "it must be a list that is not empty")

    return rule


def _reference(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    """Encode reference names: generics' names have characters that must be encoded."""
    if isinstance(value, str) and value.startswith("#/"):
        schema["$ref"] = "#" + quote(unquote(value[1:]), safe="/~$")
    return False


def _root_reference(keyword: str) -> Rule:
    """Rewrite a reference that depends on the referrer, here the root, to `$ref`."""

    def rule(schema: Schema, value: Any, place: SchemaPlace) -> bool:
        is_pointer = isinstance(value, str) and (value == "#" or value[:2] == "#/")
        if not is_pointer or "$ref" in schema:
            raise refused(keyword, value, "use $ref with a pointer: #/$defs/name")
        schema["$ref"] = value
        return True

    return rule


def _drop(schema: Schema, value: Any, place: SchemaPlace) -> bool:
    return True


# In the order in which they are applied.
RULES: tuple[tuple[str, Rule], ...] = (
    ("$schema", _drop),
    ("$vocabulary", _drop),
    ("$dynamicAnchor", _drop),
    ("$recursiveAnchor", _drop),
    ("$dynamicRef", _root_reference("$dynamicRef")),
    ("$recursiveRef", _root_reference("$recursiveRef")),
    ("$ref", _reference),
    ("type", type_rule),
    ("enum", _parts("enum")),
    ("anyOf", _parts("anyOf")),
    ("oneOf", _parts("oneOf")),
    ("allOf", _parts("allOf")),
    *(
        (f"{end}{what}", count_rule(f"{end}{what}"))
        for end in ("min", "max")
        for what in ("Items", "Length", "Properties", "Contains")
    ),
    ("minimum", limit_rule("minimum", -1)),
    ("exclusiveMinimum", limit_rule("exclusiveMinimum", -1)),
    ("maximum", limit_rule("maximum", 1)),
    ("exclusiveMaximum", limit_rule("exclusiveMaximum", 1)),
    ("not", _not),
    ("if", _if),
    ("then", _drop),
    ("else", _drop),
    ("format", format_rule),
    ("pattern", pattern_rule),
    ("properties", properties_rule),
    ("required", required_rule),
    ("propertyNames", property_names_rule),
    ("unevaluatedProperties", unevaluated_properties_rule),
    ("dependentRequired", dependent_rule("dependentRequired")),
    ("dependentSchemas", dependent_rule("dependentSchemas")),
    ("dependencies", dependent_rule("dependencies")),
    ("minProperties", min_properties_rule),
    ("maxProperties", max_properties_rule),
    ("uniqueItems", unique_items_rule),
    ("unevaluatedItems", unevaluated_items_rule),
    ("contains", contains_rule),
    ("minContains", _drop),
    ("maxContains", _drop),
)
