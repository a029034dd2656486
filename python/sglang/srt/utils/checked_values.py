"""Checks values in files against tables, with errors that name file and key.

Knows no formats or keys: the tables are next to their readers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.utils.json_file import shown

REQUIRED = object()


class Key(NamedTuple):
    """Allowed values of a key.

    Fields:
        kind: int (4096.0 is one), float, bool, str, list or dict.
        of: kind of a list's elements, or None for any. low, high: inclusive bounds of a
        number, or of a list's numbers.
        default: value of a missing or null key, or REQUIRED.
    """

    kind: type
    low: float = -math.inf
    high: float = math.inf
    default: Any = None
    of: type | None = None


_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


class ConfigValues:
    """Checked values of a JSON object.

    Args:
        file: name of the file, for errors.
        keys: table of the known keys.
        where: prefix of keys in errors, for an object inside the file.
    """

    def __init__(
        self,
        file: Path,
        raw: Mapping[str, Any],
        *,
        keys: Mapping[str, Key],
        where: str = "",
    ) -> None:
        self._file = file
        self._raw = raw
        self._keys = keys
        self._where = where

    def get(self, name: str, *, default: Any = None) -> Any:
        """Return a value of the kind in the table, or its default.

        Args:
            default: replaces the table's default.

        Raises:
            ValueError: the value is missing or not allowed; names file, key and value.
        """
        key = self._keys[name]
        value: Any = self._raw.get(name)
        if value is None:
            if default is not None:
                return default
            if key.default is REQUIRED:
                raise self.error(name, f"is missing; it must be {_KINDS[key.kind]}")
            return key.default
        if key.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not _has_kind(value, key.kind):
            raise self.wrong(name, f"must be {_KINDS[key.kind]}")
        if key.kind in (int, float) and not key.low <= value <= key.high:
            raise self.wrong(name, f"must be from {key.low:g} to {key.high:g}")
        if key.of is not None:
            self._check_elements(name, key.of, key)
        return float(value) if key.kind is float else value

    def _check_elements(self, name: str, kind: type, key: Key) -> None:
        for index, element in enumerate(self._raw[name]):
            rule = None
            if not _has_kind(element, kind):
                rule = f"must be {_KINDS[kind]}"
            elif kind in (int, float) and not key.low <= element <= key.high:
                rule = f"must be from {key.low:g} to {key.high:g}"
            if rule is not None:
                raise self.error(f"{name}[{index}]", f"{rule}, got {shown(element)}")

    def wrong(self, name: str, rule: str) -> ValueError:
        """Return the error for the value of `name`, which breaks `rule`."""
        return self.error(name, f"{rule}, got {shown(self._raw.get(name))}")

    def error(self, name: str, text: str) -> ValueError:
        return ValueError(f"{self._file}: {self._where}{name} {text}")

    def within(self, name: str, keys: Mapping[str, Key]) -> ConfigValues:
        """Return the object in the value of `name`; empty if there is none."""
        raw = self.get(name) or {}
        return ConfigValues(self._file, raw, keys=keys, where=f"{self._where}{name}.")

    def integers(self, name: str, *, low: int, high: int) -> list[int]:
        """Return a list of integers, also from a single integer; empty if there is
        none.
        """
        value = self._raw.get(name)
        entries = value if isinstance(value, list) else [value]
        found = [entry for entry in entries if entry is not None]
        for entry in found:
            is_integer = isinstance(entry, int) and not isinstance(entry, bool)
            if not is_integer or not low <= entry <= high:
                raise self.wrong(name, f"must hold integers from {low} to {high}")
        return found


def _has_kind(value: Any, kind: type) -> bool:
    admitted = (int, float) if kind is float else kind
    # In Python true is also an integer.
    return isinstance(value, admitted) and (kind is bool or not isinstance(value, bool))
