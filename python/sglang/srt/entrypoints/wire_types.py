"""Types of request bodies as clients write them, if handlers read other types.

A body keeps some fields as raw JSON and others as plain objects that are parsed later;
a schema must describe their contents.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any

import msgspec

from sglang.srt.entrypoints.generate_api import GenerateRequest
from sglang.srt.entrypoints.neutral_fields import is_raw
from sglang.srt.sampling.sampling_params import RULES, SamplingParams

# Fields of `SamplingParams` that clients may also write in other ways.
_SAMPLING_TYPES: dict[str, Any] = {
    "stop": str | list[str],
    "stop_regex": str | list[str],
    "json_schema": str | dict[str, Any] | None,
    "structural_tag": str | dict[str, Any] | None,
    "logit_bias": dict[str, float] | None,
}


def wire_type(kind: Any) -> Any:
    """Return the type that describes `kind` to clients: itself, if it has no such
    fields.
    """
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    if not is_struct:
        return kind
    fields = msgspec.structs.fields(kind)
    if not any(is_raw(field.type) for field in fields):
        return kind
    types = {field.name: _readable(field.type) for field in fields}
    if kind is GenerateRequest:
        types["sampling_params"] = _SAMPLING | list[_SAMPLING] | None  # type: ignore[valid-type]
    return _copy(kind, types, is_strict=True)


def _readable(kind: Any) -> Any:
    """Return `kind` with raw JSON as any value, keeping descriptions."""
    if not is_raw(kind):
        return kind
    metas = getattr(kind, "__metadata__", (_NO_EFFECT,))
    return Annotated[Any, metas[0]]


_NO_EFFECT = msgspec.Meta(description="Has no effect.")


def _copy(kind: Any, types: dict[str, Any], *, is_strict: bool) -> Any:
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        shown = types[field.name]
        if is_raw(field.type):
            fields.append((field.name, shown, None))
        elif field.required:
            fields.append((field.name, shown))
        elif field.default is msgspec.NODEFAULT:
            made = msgspec.field(default_factory=field.default_factory)
            fields.append((field.name, shown, made))
        else:
            fields.append((field.name, shown, field.default))
    return msgspec.defstruct(
        kind.__name__,
        fields,
        kw_only=True,
        forbid_unknown_fields=is_strict,
        namespace={"__doc__": kind.__doc__},
    )


def _sampling_params() -> Any:
    rules = {name: rule for name, _, rule in RULES}
    hints = typing.get_type_hints(SamplingParams)
    types = {}
    for name in SamplingParams.__struct_fields__:
        shown = _SAMPLING_TYPES.get(name, hints[name]) | None
        if name in rules:
            shown = Annotated[shown, msgspec.Meta(description=f"Is {rules[name]}.")]
        types[name] = shown
    return _copy(SamplingParams, types, is_strict=True)


_SAMPLING = _sampling_params()
