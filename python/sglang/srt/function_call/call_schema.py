"""The JSON schema of an output that is a list of calls, for constrained decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import Tool

# Keywords whose value maps names to schemas, and those whose value is data.
_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
# They would give the references below them another base.
_BASES = frozenset({"$id", "$schema", "id"})
# Any of them says which values a schema allows.
_ASSERTIONS = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})


def calls_schema(tools: Sequence[Tool], *, max_calls: int | None = None) -> str:
    """Return the schema of a non-empty list of `{"name", "parameters"}` objects.

    References within the schema of a tool go on pointing into it.
    """
    definitions = {f"tool_{i}": _parameters(i, tool) for i, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": {"$ref": f"#/$defs/tool_{i}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    schema["items"] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return json.dumps(schema | {"$defs": definitions}, ensure_ascii=False)


def _parameters(index: int, tool: Tool) -> dict[str, Any]:
    parameters = {k: v for k, v in tool.parameters.items() if k not in _BASES}
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    moved: dict[str, Any] = _moved(parameters, f"#/$defs/tool_{index}")
    if not _ASSERTIONS & moved.keys():
        moved["type"] = "object"
    return moved


def _moved(schema: Any, root: str) -> Any:
    """Return `schema` with its references to `#` pointing to `root`."""
    if isinstance(schema, list):
        return [_moved(entry, root) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            out[key] = root + value[1:]
        elif key in _MAPS and isinstance(value, Mapping):
            out[key] = {name: _moved(entry, root) for name, entry in value.items()}
        else:
            out[key] = value if key in _DATA else _moved(value, root)
    return out
