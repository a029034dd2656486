"""Every flag of SGLang 0.5.23, and how it is handled here.

`upstream_flags.tsv` has a row per flag: its aliases, the kind of its value, values that
ask for nothing, and its class if `ServerArgs` has no such field. A flag with a field
*works*. Other flags are ignored if their value asks for nothing. Otherwise they are
either *accepted*, because their effect does not exist here, and logged once, or
*refused* with advice on what to use.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from sglang.srt.arg_groups.arg_parser import declared_fields
from sglang.srt.arg_groups.upstream_reasons import REASONS

logger = logging.getLogger(__name__)

UPSTREAM_VERSION = "0.5.23"
Class = Literal["works", "accepted", "refused"]
_TABLE = Path(__file__).with_suffix(".tsv")
_NOTHING = "-"
# Words that mean "nothing" or "automatic" for flags that take text.
_NEUTRAL_WORDS = frozenset({"none", "null", "off", "auto", "false", "{}", "[]"})
_SWITCH = {
    "1": True,
    "true": True,
    "yes": True,
    "0": False,
    "false": False,
    "no": False,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamFlag:
    """A flag of SGLang.

    Fields:
        name: name with dashes. aliases: other names.
        takes: switch, int, float, text, list, or secret (a text that is never logged).
        neutral: values that ask for nothing, as texts. None, False, an empty text or
            list and, for texts, `_NEUTRAL_WORDS` also ask for nothing.
        class_: "accepted" or "refused"; unused if the flag works.
        reason: why it is accepted, or what is missing and what to use instead.
    """

    name: str
    aliases: tuple[str, ...]
    takes: str
    neutral: tuple[str, ...]
    class_: Class
    reason: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def dest(self) -> str:
        """Name of the keyword argument."""
        return self.name.lstrip("-").replace("-", "_")

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether the server behaves the same without the flag."""
        if value is None or value is False or value in ("", [], {}, ()):
            return True
        text = _as_text(value)
        if text in self.neutral or text.lower() in _NEUTRAL_WORDS:
            return self.takes != "switch" or text.lower() == "false"
        return self.takes in ("int", "float") and _number(text) in map(
            _number, self.neutral
        )


@functools.cache
def upstream_flags() -> dict[str, UpstreamFlag]:
    """Return SGLang's flags by the name of their keyword argument."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    flags = [
        UpstreamFlag(
            name=row["flag"],
            aliases=_words(row["aliases"]),
            takes=row["takes"],
            neutral=_words(row["neutral"]),
            class_="works" if row["class"] == _NOTHING else row["class"],  # type: ignore[arg-type]
            reason="" if row["reason"] == _NOTHING else REASONS[row["reason"]],
        )
        for row in rows
    ]
    return {flag.dest: flag for flag in flags}


def flag_class(flag: UpstreamFlag, cls: type) -> Class:
    """Return the class of a flag, given the fields of the dataclass `cls`."""
    return "works" if flag.name in _own_names(cls) else flag.class_


def add_upstream_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add SGLang's flags that the dataclass `cls` lacks, hidden from --help."""
    for flag in upstream_flags().values():
        if flag_class(flag, cls) == "works":
            continue
        options: dict[str, Any] = {}
        if flag.takes == "switch":
            options = {"nargs": "?", "const": True, "type": _switch}
        elif flag.takes == "list":
            options = {"nargs": "*"}
        elif flag.takes in ("int", "float"):
            options = {"type": int if flag.takes == "int" else float}
        parser.add_argument(
            flag.name,
            *flag.aliases,
            dest=flag.dest,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            **options,
        )


def without_upstream(given: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Return the keyword arguments in `given` for the dataclass `cls`.

    Aliases get the field's name. Arguments that only SGLang has are dropped: silently
    if they ask for nothing, with a log line if their effect does not exist here.

    Raises:
        ValueError: an argument asks for something unsupported, or is given twice; names
            it, its value and what to use.
        TypeError: there is no such argument; names similar ones.
    """
    kept: dict[str, Any] = {}
    names = {
        name.removeprefix("--").replace("-", "_"): field
        for name, field in _own_names(cls).items()
    }
    for name, value in given.items():
        field = names.get(name)
        if field is None:
            flag = upstream_flags().get(name)
            if flag is None:
                raise TypeError(_unknown(name, list(names)))
            judge(flag, value)
        elif field in kept:
            raise ValueError(f"{name} sets {field} a second time; keep one of them")
        else:
            kept[field] = value
    return kept


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return (
        f"there is no argument {name!r}; {hint}arguments are the server's flags "
        "(docs/server_arguments.md)"
    )


def with_upstream_keywords(cls: type[T]) -> type[T]:
    """Let the constructor of the dataclass `cls` accept the arguments
    `without_upstream` knows.
    """
    init = cls.__init__

    @functools.wraps(init)
    def screened(self: T, **given: Any) -> None:
        init(self, **without_upstream(given, cls))

    cls.__init__ = screened  # type: ignore[method-assign, assignment]
    return cls


def judge(flag: UpstreamFlag, value: Any) -> None:
    """Accept a flag that `ServerArgs` lacks, with a log line if its value asks for
    something.

    Raises:
        ValueError: the flag is refused; names the flag, its value and what to use.
    """
    if flag.asks_for_nothing(value):
        return
    is_shown = value is not True and flag.takes != "secret"
    told = f"{flag.name} {_as_text(value)}" if is_shown else flag.name
    if flag.class_ == "refused":
        raise ValueError(f"{told}: {flag.reason}")
    logger.warning("%s is accepted and changes nothing: %s", told, flag.reason)


@functools.cache
def _own_names(cls: type) -> dict[str, str]:
    """Return every flag name of the dataclass `cls`, with its field."""
    return {
        name: declared.field.name
        for declared in declared_fields(cls)
        for name in (declared.flag, *declared.arg.aliases)
    }


def _words(text: str) -> tuple[str, ...]:
    return () if text == _NOTHING else tuple(text.split())


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        return " ".join(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return _SWITCH[text.lower()]
