"""Unknown fields of requests: each is ignored with one log line, or rejected.

Clients of other servers send additional fields; fields that would change the meaning of
an answer are in `neutral_fields` and rejected by name.
"""

from __future__ import annotations

import functools
import logging
import re
import types
import typing
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import msgspec

from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.quoting import clipped, quoted

logger = logging.getLogger(__name__)

# Clients choose the names, and must not be able to fill the log or the memory.
MAX_NAMES = 128
MAX_NAME_CHARS = 100
_INDEX = re.compile(r"\[\d+\]")


class UnknownFields:
    """Ignores or rejects the unknown fields of one server's requests."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._told: set[str] = set()

    def check(self, path: str, known: typing.Iterable[str]) -> None:
        """Ignore or reject an unknown field.

        Args:
            path: path in the body. known: known fields of its level.

        Raises:
            BadRequest: unknown fields are rejected.
        """
        if self.is_strict:
            raise BadRequest(
                f"unknown field {quoted(path)}; known fields: {', '.join(known)}",
                param=path,
            )
        self.ignore(path)

    def ignore(self, path: str) -> None:
        """Log an unknown field, unless it was logged before."""
        name = _INDEX.sub("[]", clipped(path, MAX_NAME_CHARS))
        if name in self._told or len(self._told) > MAX_NAMES:
            return
        self._told.add(name)
        if len(self._told) > MAX_NAMES:
            logger.warning("further unknown fields are ignored without a word")
            return
        logger.warning(
            "the unknown field %s is ignored (--strict-fields refuses it)", quoted(name)
        )


UNKNOWN_FIELDS: ContextVar[UnknownFields] = ContextVar(
    "unknown_fields",
    default=UnknownFields(),  # noqa: B039
)
"""The unknown fields of the running task's server; set when its body is read."""


@functools.cache
def lenient(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct like `kind` that ignores unknown fields, also on inner levels."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        inner = inner_struct(field.type)
        if inner is not None:
            default = field.default if not field.required else msgspec.NODEFAULT
            fields.append((field.name, lenient(inner) | None, default))
    return msgspec.defstruct(
        kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=False
    )


def inner_struct(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a field of type `kind` holds, if any."""
    parts = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for part in parts:
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def unknown_names(
    raw: bytes | bytearray | msgspec.Raw, kind: type[msgspec.Struct], where: str = ""
) -> Iterator[str]:
    """Yield the path of each field in a JSON object that `kind` does not have."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        if name not in fields:
            yield where + name
            continue
        inner = inner_struct(fields[name].type)
        if inner is not None and bytes(value).startswith(b"{"):
            yield from unknown_names(value, inner, f"{where}{name}.")
