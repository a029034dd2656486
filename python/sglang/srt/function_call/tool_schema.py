"""What a tool's schema allows for each parameter.

Covers only what is needed to read a text: types and constants. The contents of objects
and lists are not examined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Schemas are untrusted. Anything deeper or more expensive than this allows any value.
MAX_DEPTH = 64
MAX_CONSTANTS = 256
MAX_STEPS = 1 << 18

KINDS = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
# Clients' names for JSON schema types.
_KIND_NAMES = {kind: kind for kind in KINDS} | {
    **{"str": "string", "text": "string", "int": "integer", "float": "number"},
    **{"double": "number", "bool": "boolean", "dict": "object", "list": "array"},
    **{"tuple": "array", "none": "null"},
}
_OBJECT_KEYS = ("properties", "additionalProperties", "required")


@dataclass(frozen=True, slots=True)
class Reading:
    """The values that a schema allows, as far as needed to read a text.

    Fields:
        kinds: JSON schema types whose values are all allowed.
        constants: further values that are allowed, by type and value.
    """

    kinds: frozenset[str] = frozenset()
    constants: Mapping[tuple[str, Any], Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether the schema says nothing about the type."""
        return self.kinds == KINDS

    def __or__(self, other: Reading) -> Reading:
        return _reading(
            self.kinds | other.kinds,
            (*self.constants.values(), *other.constants.values()),
        )

    def __and__(self, other: Reading) -> Reading:
        kinds = _widened(self.kinds) & _widened(other.kinds)
        constants = [c for c in self.constants.values() if other.allows(c)]
        constants += [c for c in other.constants.values() if self.allows(c)]
        return _reading(kinds, constants)

    def allows(self, value: Any) -> bool:
        kind = kind_of(value)
        return kind in _widened(self.kinds) or (
            kind not in ("object", "array") and (kind, value) in self.constants
        )

    def as_written(self, value: Any) -> Any:
        """Return an allowed value in the schema's form: 1 for 1.0."""
        if isinstance(value, list | dict):
            return value
        return self.constants.get((kind_of(value), value), value)


ANYTHING = Reading(KINDS)


class ToolSchema:
    """The parameters of one tool; each node of its schema is visited once."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters
        self._known: dict[int, Reading] = {}
        self.steps = 0
        self._others = ANYTHING
        self._properties: dict[str, list[Any]] = {}
        self._parameters: dict[str, Reading] = {}
        self._collect(parameters, set(), 0)

    @property
    def names(self) -> Mapping[str, Any]:
        """The parameters that the schema declares."""
        return self._properties

    def reading(self, name: str) -> Reading:
        """Return the values allowed for the parameter `name`."""
        if name not in self._properties:
            return self._others
        found = self._parameters.get(name)
        if found is None:
            found = Reading()
            for schema in self._properties[name]:
                found |= self._read(schema, 0)
            self._parameters[name] = found
        return found

    def _collect(self, schema: Any, seen: set[int], depth: int) -> None:
        """Find the properties of an object, including its alternatives."""
        if not isinstance(schema, Mapping) or id(schema) in seen or depth > MAX_DEPTH:
            return
        seen.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            for name, entry in properties.items():
                self._properties.setdefault(name, []).append(entry)
        others = schema.get("additionalProperties")
        if isinstance(others, Mapping) and others:
            self._others = self._read(others, 0)
        for inner in (self._target(schema), *_branches(schema, "allOf")):
            self._collect(inner, seen, depth + 1)
        for word in ("anyOf", "oneOf"):
            for inner in _branches(schema, word):
                self._collect(inner, seen, depth + 1)

    def _read(self, schema: Any, depth: int) -> Reading:
        self.steps += 1
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ANYTHING
        known = self._known.get(id(schema))
        if known is not None or self.steps > MAX_STEPS:
            return known or ANYTHING
        self._known[id(schema)] = ANYTHING  # for a schema that refers to itself
        found = _stated(schema)
        for word in ("anyOf", "oneOf"):
            if choices := list(_branches(schema, word)):
                found &= self._any_of(choices, depth + 1)
        target = self._target(schema)
        parts = list(_branches(schema, "allOf"))
        for inner in parts if target is None else [target, *parts]:
            found &= self._read(inner, depth + 1)
        if schema.get("nullable") is True:  # OpenAPI
            found |= Reading(frozenset({"null"}))
        self.steps += len(found.constants)
        self._known[id(schema)] = found
        return found

    def _any_of(self, choices: list[Any], depth: int) -> Reading:
        kinds: set[str] = set()
        constants: list[Any] = []
        for choice in choices:
            found = self._read(choice, depth)
            kinds |= found.kinds
            if len(constants) <= MAX_CONSTANTS:
                constants += found.constants.values()
        return _reading(kinds, constants)

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """Return the schema inside this one that `$ref` points to, or None."""
        ref = schema.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        node: Any = self._root
        for step in ref[1:].split("/")[1 : MAX_DEPTH + 1]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping):
                node = node.get(step)
            elif isinstance(node, list) and step.isdecimal() and len(step) < 7:
                node = node[int(step)] if int(step) < len(node) else None
        return node


def kind_of(value: Any) -> str:
    """Return the JSON schema type of a value; integers are `integer`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {int: "integer", str: "string", list: "array"}
    return names.get(type(value), "object")


def _widened(kinds: frozenset[str]) -> frozenset[str]:
    return kinds | {"integer"} if "number" in kinds else kinds


def _reading(kinds: Iterable[str], constants: Iterable[Any]) -> Reading:
    """Return a reading without duplicates; a long list of constants allows all values
    of their types.
    """
    told: dict[tuple[str, Any], Any] = {}
    kinds = set(kinds)
    for constant in constants:
        kind = kind_of(constant)
        if kind in ("object", "array") or len(told) >= MAX_CONSTANTS:
            kinds.add(kind)
        elif kind not in kinds:
            told[kind, constant] = constant
    return Reading(frozenset(kinds), told)


def _stated(schema: Mapping[str, Any]) -> Reading:
    """Read what a schema says itself, without the schemas inside it."""
    found = ANYTHING
    names = schema.get("type")
    names = names if isinstance(names, list) else [names]
    kinds = {
        _KIND_NAMES[name.lower()]
        for name in names
        if isinstance(name, str) and name.lower() in _KIND_NAMES
    }
    if kinds:
        found = Reading(frozenset(kinds))
    elif any(isinstance(schema.get(key), Mapping) for key in _OBJECT_KEYS):
        found = Reading(frozenset({"object"}))
    elif isinstance(schema.get("items"), Mapping):
        found = Reading(frozenset({"array"}))
    if "const" in schema:
        found &= _reading(set(), (schema["const"],))
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        found &= _reading(set(), schema["enum"])
    return found


def _branches(schema: Mapping[str, Any], word: str) -> list[Any]:
    entries = schema.get(word)
    return entries if isinstance(entries, list) else []
