"""Finds the schemas inside a JSON schema, and resolves references."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

# Keywords whose value maps names to schemas for other places.
MAPS = ("properties", "patternProperties")
DEFINITIONS = ("$defs", "definitions")
# Keywords with one schema for another place, or a list of them.
PLACES = ("items", "prefixItems", "additionalItems", "additionalProperties")
# Keywords whose schemas describe the same place as their parent.
ALTERNATIVES = ("anyOf", "oneOf")
PARTS = ("allOf", *ALTERNATIVES)

UNKNOWN = object()
_PLAIN = re.compile(r"[\w$-]{1,64}")
_MAX_STEP_CHARS = 64
_MAX_PATH_CHARS = 400


class Path(NamedTuple):
    """A path in a document; its text is built only on demand."""

    parent: Path | None
    step: str | int

    def __str__(self) -> str:
        steps: list[str] = []
        path: Path | None = self
        while path is not None:
            steps.append(_shown(path.step))
            path = path.parent
        text = "".join(reversed(steps)).removeprefix(".")
        return text if len(text) <= _MAX_PATH_CHARS else f"...{text[-_MAX_PATH_CHARS:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPlace:
    """Where a schema is: the document and the path in it."""

    root: Any
    path: Path | None

    def resolve(self, reference: Any) -> Any:
        """Return the target of `reference` in the document, or `UNKNOWN`."""
        return resolve(self.root, reference)

    def pointer(self, *steps: str) -> str:
        """Return the reference to something within the schema."""
        names: list[str | int] = list(reversed(steps))
        path = self.path
        while path is not None:
            names.append(path.step)
            path = path.parent
        return "#" + "".join(
            "/" + quote(str(name).replace("~", "~0").replace("/", "~1"), safe="~$")
            for name in reversed(names)
        )


def children(
    schema: dict[str, Any], path: Path | None = None
) -> Iterator[tuple[Any, Path]]:
    """Yield the schemas inside `schema`, except its definitions."""
    for keyword in MAPS:
        holder = schema.get(keyword)
        if isinstance(holder, dict):
            for name, part in holder.items():
                yield part, Path(Path(path, keyword), name)
    for keyword in (*PLACES, *PARTS):
        value = schema.get(keyword)
        if isinstance(value, list):
            for i, part in enumerate(value):
                yield part, Path(Path(path, keyword), i)
        elif keyword in schema:
            yield value, Path(path, keyword)


def resolve(root: Any, reference: Any) -> Any:
    """Return the schema at a pointer into the document, or `UNKNOWN`."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return UNKNOWN
    found = root
    for step in _steps(reference):
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return UNKNOWN
    return found


def pointer_path(reference: str) -> Path | None:
    """Return the path of a pointer."""
    path = None
    for step in _steps(reference):
        path = Path(path, step)
    return path


def _shown(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return "." + (step if _PLAIN.fullmatch(step) else repr(step[:_MAX_STEP_CHARS]))


def _steps(reference: str) -> list[str]:
    steps = filter(None, unquote(reference[1:]).split("/"))
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]
