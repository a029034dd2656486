"""Flags from a YAML file: `--config FILE`.

A key is the name of a flag or alias, with dashes or underscores, including SGLang's
flags. Values have the flag's type; the command line takes precedence.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from sglang.srt.arg_groups.arg_parser import (
    OFF,
    Declared,
    declared_fields,
    flag_name,
)
from sglang.srt.arg_groups.upstream_flags import upstream_flags
from sglang.srt.utils.json_file import read_text_file

MAX_BYTES = 1 << 20
CONFIG_FLAG = "--config"
# Descriptions of types of values, and how to write them.
_KINDS = {
    bool: ("a switch", "write true or false"),
    int: ("a whole number", "write digits without quotes"),
    float: ("a number", "write digits without quotes"),
    str: ("a text", "write it in quotes"),
}


def read_config(path: str, cls: type) -> dict[str, Any]:
    """Return the fields of the dataclass `cls`, and arguments of SGLang, that the file
    sets.

    Raises:
        ValueError: the file is missing or not YAML, a key is unknown or repeated, or a
            value has the wrong type. The message is one line that names file, line, key
            and fix.
    """
    known = {
        name.removeprefix("--"): declared
        for declared in declared_fields(cls)
        for name in (declared.flag, *declared.arg.aliases)
    }
    upstream = {
        name.lstrip("-"): flag
        for flag in upstream_flags().values()
        for name in flag.names
    }
    values: dict[str, Any] = {}
    for line, key, value in _entries(path):
        where = f"{CONFIG_FLAG} {path}, line {line}: "
        name = key.replace("_", "-")
        declared, other = known.get(name), upstream.get(name)
        if declared is not None:
            flag, field = declared.flag, declared.field.name
            value = _checked(f"{where}{key}", value, declared)
        elif other is not None:
            flag, field = other.name, other.dest
        else:
            raise ValueError(f"{where}{key!r} is no flag{_nearest(key, known)}")
        if field in values:
            raise ValueError(
                f"{where}{key} sets {flag} a second time; keep one of them"
            )
        values[field] = value
    return values


def _entries(path: str) -> list[tuple[int, str, Any]]:
    """Yield the line, key and value of each entry in file order."""
    try:
        text = read_text_file(Path(path), max_bytes=MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"{CONFIG_FLAG} {error}; name a YAML file") from error
    try:
        return _parsed(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", error)
        raise ValueError(
            f"{CONFIG_FLAG} {path}{line}: not YAML of flags ({problem}); write one "
            "`flag: value` per line"
        ) from error


def _parsed(text: str) -> list[tuple[int, str, Any]]:
    """Return the entries of a YAML document, including repeated keys."""
    loader = yaml.SafeLoader(text)
    root = loader.get_single_node()
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it is no mapping")
    return [
        (
            key.start_mark.line + 1,
            str(key.value) if isinstance(key, yaml.ScalarNode) else "a list",
            _constructed(loader, value),
        )
        for key, value in root.value
    ]


def _constructed(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Return the value of a node. Nested nodes are not built, because aliases and merge
    keys could make them larger than any memory.
    """
    entries = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(entry, yaml.ScalarNode) for entry in entries):
        return {}
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as error:  # an invalid date, or thousands of digits
        raise yaml.constructor.ConstructorError(
            None, None, str(error), node.start_mark
        ) from error


def _checked(where: str, value: Any, declared: Declared) -> Any:
    """Return `value` with the field's type; bounds and choices are checked later."""
    if value is None:
        if declared.field.default is None:
            return None
        raise ValueError(f"{where} has no value; write one, or remove the line")
    if value is False and declared.off_words:
        return OFF  # YAML's value for the unquoted word
    entry = declared.entry_kind
    if not declared.is_list:
        return _checked_entry(where, value, entry)
    entries = value if isinstance(value, list) else [value]
    return [_checked_entry(where, each, entry) for each in entries]


def _checked_entry(where: str, value: Any, kind: type) -> Any:
    # YAML reads 1e-3 as a string, and true is an int in Python.
    is_bool = isinstance(value, bool)
    if kind is bool and is_bool or kind is str and isinstance(value, str):
        return value
    if kind is int and isinstance(value, int) and not is_bool:
        return value
    if kind is float and not is_bool and isinstance(value, (int, float, str)):
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, (dict, list, set)):
        raise ValueError(f"{where} is nested; write a single value")
    # A string may be a key, which must not be logged.
    shown = "the value" if kind is str else repr(value)
    due, fix = _KINDS[kind]
    raise ValueError(f"{where}: {shown} is not {due}; {fix}")


def _nearest(key: str, known: dict[str, Declared]) -> str:
    """Return the end of a message, with the flag that was probably meant."""
    close = difflib.get_close_matches(flag_name(key).removeprefix("--"), known, n=1)
    return f"; did you mean {close[0]}?" if close else "; --help lists every flag"
