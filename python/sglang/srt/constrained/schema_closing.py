"""Closes the objects of a JSON schema: declared properties only.

A model may add properties to an open object until it reaches its token limit, and few
schemas say `additionalProperties: false`. Knows nothing about grammar libraries.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.constrained.schema_places import (
    ALTERNATIVES,
    DEFINITIONS,
    UNKNOWN,
    children,
    resolve,
)

# Keywords that open or close an object explicitly.
_EXPLICIT = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: Any) -> bool:
    """Add `additionalProperties: false` to the objects of `schema`, in place.

    Closes objects with `properties` that say nothing about other properties; required
    but undescribed properties are declared. Leaves open:

    - maps, which declare no properties;
    - objects described in parts (`allOf`, `properties` beside a `$ref` or beside an
      `anyOf` with properties of its own): a closed part would reject the properties of
      the other parts. A part that is a `$ref` leaves its target open everywhere.

    Returns:
        Whether anything was added.
    """
    document = _Document(schema)
    parts = document.parts_of_objects()
    has_closed = False
    for node in document.schemas.values():
        is_open = isinstance(node.get("properties"), dict) and not any(
            node.get(keyword) is not None for keyword in _EXPLICIT
        )
        if is_open and id(node) not in parts:
            node["additionalProperties"] = False
            for name in _list(node.get("required")):
                if isinstance(name, str):
                    node["properties"].setdefault(name, True)
            has_closed = True
    return has_closed


class _Document:
    """The schemas of a document and how they combine. Linear in the document's size,
    because it comes from a client.

    Attributes:
        schemas: all schemas by identity.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self.schemas: dict[int, dict[str, Any]] = {}
        # For each schema, what describes its place: all groups apply, and one or all
        # schemas of each group.
        self._groups: dict[int, list[list[Any]]] = {}
        todo = [root]
        while todo:
            node = todo.pop()
            if isinstance(node, dict) and id(node) not in self.schemas:
                self.schemas[id(node)] = node
                self._groups[id(node)] = self._combined_groups(node)
                todo += _all_children(node)
                if "$ref" in node:
                    todo.append(resolve(root, node["$ref"]))

    def parts_of_objects(self) -> set[int]:
        """Return identities of schemas that describe one of several parts of an
        object.
        """
        declaring = self._declaring()
        todo: list[Any] = []
        for groups in self._groups.values():
            several = [
                group
                for group in groups
                if any(id(part) in declaring for part in group)
            ]
            if len(several) > 1:
                todo += [part for group in several for part in group]
        parts: set[int] = set()
        while todo:
            part = todo.pop()
            if isinstance(part, _Own):
                parts.add(id(part.schema))
            elif id(part) in self._groups and id(part) not in parts:
                parts.add(id(part))
                todo += [other for group in self._groups[id(part)] for other in group]
        return parts

    def _declaring(self) -> set[int]:
        """Return identities of schemas that declare properties of the place they
        describe.
        """
        holders: dict[int, list[int]] = {}
        todo = [id(UNKNOWN)]
        for holder, groups in self._groups.items():
            for part in (part for group in groups for part in group):
                holders.setdefault(id(part), []).append(holder)
                if isinstance(part, _Own):
                    todo.append(id(part))
        found: set[int] = set()
        while todo:
            one = todo.pop()
            if one not in found:
                found.add(one)
                todo += holders.get(one, [])
        return found

    def _combined_groups(self, schema: dict[str, Any]) -> list[list[Any]]:
        groups: list[list[Any]] = [[part] for part in _list(schema.get("allOf"))]
        groups += [_list(schema.get(keyword)) for keyword in ALTERNATIVES]
        if "$ref" in schema:
            groups.append([resolve(self._root, schema["$ref"])])
        if "properties" in schema:
            groups.append([_Own(schema)])
        return groups


class _Own:
    """The properties of a schema itself, without the schemas it is combined with."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _all_children(schema: dict[str, Any]) -> list[Any]:
    """Yield all schemas directly inside `schema`."""
    found = [part for part, _ in children(schema)]
    for keyword in DEFINITIONS:
        holder = schema.get(keyword)
        if isinstance(holder, dict):
            found += holder.values()
    return found
