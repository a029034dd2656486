"""Rewrites a JSON schema from any generator to the keywords that llguidance reads.

Keywords without effect are removed, keywords with an equivalent in supported keywords
are rewritten, and keywords that would be dropped or fail later are rejected with their
path. Reads only what is reachable from the root: unused definitions may contain
anything. Linear in the document's size, because it comes from a client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sglang.srt.constrained.schema_keywords import read_keywords
from sglang.srt.constrained.schema_places import (
    PARTS,
    UNKNOWN,
    Path,
    SchemaPlace,
    children,
    pointer_path,
    resolve,
)
from sglang.srt.constrained.schema_rules import UnservedError

_MAX_CYCLE_SHOWN = 8


def read_schema(root: Any) -> None:
    """Rewrite `root` in place.

    Raises:
        ValueError: names the path of what is not supported.
    """
    reached = _Reached(root)
    for schema, path in reached.walk():
        try:
            read_keywords(schema, SchemaPlace(root=root, path=path))
        except UnservedError as error:
            raise ValueError(f"{Path(path, error.keyword)}: {error}") from error
    reached.refuse_cycles()


class _Reached:
    """The schemas reachable from the root of a document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._schemas: dict[int, dict[str, Any]] = {}
        self._paths: dict[int, Path | None] = {}

    def walk(self) -> Iterator[tuple[dict[str, Any], Path | None]]:
        """Yield each schema with its path, before visiting its parts.

        Raises:
            ValueError: something is not a schema where one is required.
        """
        todo: list[tuple[Any, Path | None]] = [(self._root, None)]
        while todo:
            schema, path = todo.pop()
            if isinstance(schema, bool) or id(schema) in self._schemas:
                continue
            if not isinstance(schema, dict):
                raise ValueError(
                    f"{path or 'the schema'} must be a schema, an object or a boolean, "
                    f"got {_short(schema)}"
                )
            self._schemas[id(schema)] = schema
            self._paths[id(schema)] = path
            yield schema, path
            todo += children(schema, path)
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                target = resolve(self._root, reference)
                if target is not UNKNOWN:
                    todo.append((target, pointer_path(reference)))
                elif reference.startswith("#/"):
                    raise ValueError(
                        f"{Path(path, '$ref')}: {_short(reference)} names nothing in "
                        "this schema"
                    )

    def refuse_cycles(self) -> None:
        """Reject a schema that describes its own place by itself, with no part of a
        value in between: it describes nothing.

        Raises:
            ValueError: names the cycle.
        """
        done: set[int] = set()
        for start, schema in self._schemas.items():
            if start in done:
                continue
            # Schemas being followed, each with its remaining parts.
            chain = {start: self._same_place(schema)}
            while chain:
                last = next(reversed(chain))
                part = next(chain[last], None)
                if part is None:
                    done.add(last)
                    del chain[last]
                elif id(part) in chain:
                    self._refuse_cycle(list(chain), id(part))
                elif id(part) not in done:
                    chain[id(part)] = self._same_place(part)

    def _same_place(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        parts = [resolve(self._root, schema["$ref"])] if "$ref" in schema else []
        for keyword in PARTS:
            value = schema.get(keyword)
            parts += value if isinstance(value, list) else []
        return (part for part in parts if id(part) in self._schemas)

    def _refuse_cycle(self, chain: list[int], repeated: int) -> None:
        cycle = chain[chain.index(repeated) :]
        names = [
            str(self._paths[one] or "the schema") for one in cycle[:_MAX_CYCLE_SHOWN]
        ]
        if len(cycle) > _MAX_CYCLE_SHOWN:
            names.append("...")
        raise ValueError(
            f"{names[0]} refers to itself without a property or an item between, which "
            f"describes no value: {' -> '.join([*names, names[0]])}"
        )


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:80]
