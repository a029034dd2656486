"""Reads `response_format` in every form that clients use.

Nothing is dropped silently: anything without a meaning here is rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.quoting import quoted

_FIELD = "response_format"
TYPES = ("text", "json_object", "json_schema", "structural_tag")
_ANY_OBJECT = {"type": "object"}
# Fields that hold a schema, and fields that may accompany one.
_HOLDERS = ("json_schema", "schema")
_BESIDE = frozenset({"name", "description", "strict"})


def response_constraint(
    response_format: Mapping[str, Any] | None,
) -> tuple[str, str] | None:
    """Return the sampling parameter that constrains the output and its value, or None
    for free text.

    Raises:
        BadRequest: names the field and the legal values.
    """
    if response_format is not None and response_format.get("type") == "structural_tag":
        return "structural_tag", _encoded(response_format)
    schema = response_schema(response_format)
    return None if schema is None else ("json_schema", schema)


def response_schema(response_format: Mapping[str, Any] | None) -> str | None:
    """Return the JSON schema that the output must follow, or None for free text.

    The schema is in `json_schema.schema` (OpenAI), in `schema` (responses, llama.cpp),
    or is `json_schema` itself; `json_object` may also have one.

    Raises:
        BadRequest: names the field and the legal values.
    """
    if not response_format:
        return None
    kind = response_format.get("type")
    if kind not in TYPES:
        raise BadRequest(
            f"{_FIELD}.type is {quoted(kind)}; supported: {', '.join(TYPES)}",
            param=f"{_FIELD}.type",
        )
    given = {k: v for k, v in response_format.items() if k != "type" and v is not None}
    schemas = [name for name in _HOLDERS if name in given]
    known = (*_HOLDERS, *_BESIDE) if kind != "text" else ()
    _refuse_unknown(given, known, _FIELD)
    if len(schemas) > 1:
        raise BadRequest(
            f"{_FIELD} has json_schema and schema; send one of them", param=_FIELD
        )
    if kind == "text":
        return None
    if not schemas:
        if kind == "json_schema":
            raise _no_schema(f"{_FIELD}.json_schema.schema", f"{_FIELD}.json_schema")
        return _encoded(_ANY_OBJECT)
    where = f"{_FIELD}.{schemas[0]}"
    return _encoded(_schema(given[schemas[0]], where, schemas[0]))


def _schema(value: Any, where: str, field: str) -> Mapping[str, Any]:
    if field == "json_schema" and isinstance(value, dict):
        if value.get("schema") is not None or not value.keys() - _BESIDE - {"schema"}:
            _refuse_unknown(value, ("schema", *_BESIDE), where)
            value = value.get("schema")
        elif value.keys() & {"name", "strict"}:
            # Also not a schema.
            raise _no_schema(f"{where}.schema", where)
    if not isinstance(value, dict):
        raise _no_schema(f"{where}.schema" if field == "json_schema" else where, where)
    return value


def _refuse_unknown(
    given: Mapping[str, Any], known: tuple[str, ...], where: str
) -> None:
    for name in given:
        if given[name] is not None and name not in known:
            listed = ", ".join(sorted(known)) or "nothing beside type"
            raise BadRequest(
                f"{where} has the unknown field {quoted(name)}; known: {listed}",
                param=where,
            )
    strict = given.get("strict")
    if not isinstance(strict, bool | None):
        raise BadRequest(
            f"{where}.strict is {quoted(strict)}; it must be a boolean",
            param=f"{where}.strict",
        )


def _no_schema(what: str, param: str) -> BadRequest:
    return BadRequest(f"{what} must be a JSON schema object", param=param)


def _encoded(schema: Mapping[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()
