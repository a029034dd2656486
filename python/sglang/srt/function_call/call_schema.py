"""The JSON schema of an output that is a list of calls, for constrained decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import Tool

# Keywords whose value maps names to schemas, and keywords whose value is data.
_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
# These would change the base of the references below them.
_BASES = frozenset({"$id", "$schema", "id"})
_REFERENCES = frozenset({"$ref", "$recursiveRef", "$dynamicRef"})
# Each of these restricts the values of a schema.
_ASSERTIONS = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})


def calls_schema(tools: Sequence[Tool], *, max_calls: int | None = None) -> str:
    """Return the schema of a non-empty list of `{"name", "parameters"}` objects.

    References within a tool's schema keep pointing into it. Each tool is a definition
    with the tool's name, which appears in the path of an error.
    """
    definitions = {
        tool.name: parameters_schema(tool, root=f"#/$defs/{tool.name}")
        for tool in tools
    }
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": {"$ref": f"#/$defs/{tool.name}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    schema["items"] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return json.dumps(schema | {"$defs": definitions}, ensure_ascii=False)


def parameters_schema(tool: Tool, *, root: str = "#") -> dict[str, Any]:
    """Return the schema of a tool's arguments, an object.

    Args:
        root: path of the schema in the document.
    """
    parameters = {k: v for k, v in tool.parameters.items() if k not in _BASES}
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    base = tool.parameters.get("$id")
    moved: dict[str, Any] = _moved(
        parameters,
        root=root,
        base=base.rstrip("#") if isinstance(base, str) else "",
    )
    if not _ASSERTIONS & moved.keys():
        moved["type"] = "object"
    return moved


def _moved(schema: Any, *, root: str, base: str) -> Any:
    """Return `schema` with references to `#` changed to `root`.

    Args:
        base: allowed prefix of its references.
    """
    if isinstance(schema, list):
        return [_moved(entry, root=root, base=base) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _REFERENCES and isinstance(value, str):
            inner = value.removeprefix(base)
            is_pointer = inner == "#" or inner.startswith("#/")
            out[key] = root + inner[1:] if is_pointer else value
        elif key in _MAPS and isinstance(value, Mapping):
            out[key] = {
                name: _moved(entry, root=root, base=base)
                for name, entry in value.items()
            }
        elif key in _DATA:
            out[key] = value
        else:
            out[key] = _moved(value, root=root, base=base)
    return out
