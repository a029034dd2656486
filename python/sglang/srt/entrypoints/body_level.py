"""One object inside a request body, read field by field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang.srt.entrypoints.neutral_fields import ANY, Neutral
from sglang.srt.entrypoints.unknown_fields import UNKNOWN_FIELDS
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.quoting import quoted

# Type of a part whose text is in a field of the same name.
REFUSAL = "refusal"


class BodyLevel:
    """An object at some path of the body; unknown fields are handled by
    `UNKNOWN_FIELDS`.

    Args:
        where: path of the object, for errors.
        read: names of the fields that are read.
        neutral: other fields, which must have a neutral value.

    Raises:
        BadRequest: names the problem and its path.
    """

    def __init__(
        self,
        value: Any,
        where: str,
        *,
        read: Sequence[str],
        neutral: Mapping[str, Neutral] | None = None,
    ) -> None:
        if not isinstance(value, dict):
            raise BadRequest(f"{where} must be an object", param=where)
        self.where = where
        self._value = value
        neutral = neutral or {}
        for name, entry in value.items():
            path = f"{where}.{name}"
            if name in read:
                continue
            if name not in neutral:
                UNKNOWN_FIELDS.get().check(path, (*read, *neutral))
                continue
            if not neutral[name].accepts(entry):
                raise BadRequest(
                    f"{path} is not supported by this server; {neutral[name].advice}",
                    param=path,
                )

    def get(self, name: str) -> Any:
        """Return the value of a field, or None if missing."""
        return self._value.get(name)

    def text(self, name: str, *, default: str | None = None) -> str:
        """Return the string in a field, which may be missing if there is a
        `default`.
        """
        value = self._value.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            path = f"{self.where}.{name}"
            raise BadRequest(f"{path} must be a string", param=path)
        return value

    def flag(self, name: str) -> bool:
        """Return the boolean in a field, or False if missing."""
        value = self._value.get(name)
        if not isinstance(value, bool | None):
            path = f"{self.where}.{name}"
            raise BadRequest(f"{path} must be true or false", param=path)
        return bool(value)


def read_kind(
    value: Any, where: str, known: Sequence[str], *, default: str = ""
) -> str:
    """Return the `type` of an object, one of `known`.

    Args:
        default: the type of an object without a `type`.

    Raises:
        BadRequest: the type is not known.
    """
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object", param=where)
    kind = value.get("type") or default
    if not isinstance(kind, str) or kind not in known:
        raise BadRequest(
            f"{where} is of type {quoted(kind)}; this server reads {', '.join(known)}",
            param=f"{where}.type",
        )
    return kind


def entries(value: Any, where: str) -> list[tuple[Any, str]]:
    """Yield the entries of a list, each with its path."""
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list", param=where)
    return [(entry, f"{where}[{i}]") for i, entry in enumerate(value)]


def joined_texts(
    content: Any, where: str, kinds: Sequence[str], ignored: Iterable[str]
) -> str:
    """Return the text of `content`: a string, or a list of parts with a `text` or
    `refusal`.

    Args:
        kinds: accepted types of parts. ignored: fields of parts that have no effect.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part, path in entries(content, where):
        kind = read_kind(part, path, kinds)
        field = kind if kind == REFUSAL else "text"
        level = BodyLevel(
            part, path, read=("type", field), neutral=dict.fromkeys(ignored, ANY)
        )
        texts.append(level.text(field))
    return "".join(texts)
