"""Flags declared once, as annotated fields of a dataclass.

`name: Annotated[type, Arg("help", choices, low=, high=)] = default` is the whole
declaration of a field. The command line (`add_fields`), the check of values from Python
(`check_values`) and the documentation are derived from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import logging
import sys
import types
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, NoReturn

from sglang.version import VERSION_TEXT

logger = logging.getLogger(__name__)

OFF = "off"
OFF_WORDS = ("none", OFF, "null")


class Synonym(NamedTuple):
    """A word for a choice; `note` is logged to say what the choice is instead."""

    word: str
    choice: str
    note: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arg:
    """Help text and allowed values of a field.

    None is always allowed and means that the flag is unset.

    Fields:
        choices: allowed values, or None for any.
        aliases: other flags with the same meaning. low, high: inclusive bounds of a
        number, or None for unbounded.
        begins: title of the group of flags that starts with this flag.
        synonyms: SGLang's words for a choice.
    """

    help: str
    choices: tuple[str, ...] | None = None
    _: dataclasses.KW_ONLY
    aliases: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    begins: str | None = None
    synonyms: tuple[Synonym, ...] = ()


class Declared(NamedTuple):
    """A field of a dataclass that is a flag; `kind` is its type without `Annotated`,
    `group` the title of its group, if it has one."""

    field: dataclasses.Field[Any]
    kind: Any
    arg: Arg
    group: str | None

    @property
    def flag(self) -> str:
        return flag_name(self.field.name)

    @property
    def is_list(self) -> bool:
        return typing.get_origin(_strip_none(self.kind)) is list

    @property
    def entry_kind(self) -> type:
        """Return the type of a value, or of a list's entries."""
        kind = _strip_none(self.kind)
        entry: type = typing.get_args(kind)[0] if self.is_list else kind
        return entry

    @property
    def off_words(self) -> tuple[str, ...]:
        """Return the words, besides its choices, that switch the flag off."""
        choices = self.arg.choices
        if choices is None:
            return ()
        others = tuple(word for word in OFF_WORDS if word not in choices)
        has_off = self.field.default is None or len(others) < len(OFF_WORDS)
        return others if has_off else ()

    def choice_meant(self, value: Any) -> Any:
        """Return the choice that a word means, or None if the flag is unset."""
        choices = self.arg.choices
        if choices is None or value in choices:
            return value
        if value in self.off_words:
            return next((word for word in OFF_WORDS if word in choices), None)
        for synonym in self.arg.synonyms:
            if value == synonym.word:
                logger.warning("%s %s: %s", self.flag, value, synonym.note)
                return synonym.choice
        return value


UNRECOGNIZED = "unrecognized arguments:"


class FlagParser(argparse.ArgumentParser):
    """Parses flags and their unambiguous prefixes; unknown flags are rejected, never
    ignored.

    Attributes:
        preferred: flags that take precedence if others share a prefix.
    """

    def __init__(
        self, *, prog: str, description: str, preferred: Iterable[str] = ()
    ) -> None:
        super().__init__(
            prog=prog,
            # Do not list all flags again in brackets.
            usage=f"{prog} [flags]",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        self.add_argument("--version", action="version", version=VERSION_TEXT)
        self.preferred = frozenset(preferred)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(list(map(self._whole, words)), namespace)

    def _whole(self, word: str) -> str:
        """Return a command line word with the full name of its flag."""
        name, equals, value = word.partition("=")
        known = self._option_string_actions
        if not name.startswith("--") or name == "--" or name in known:
            return word
        # One name per flag: aliases share the same action.
        found = {known[each]: each for each in known if each.startswith(name)}
        if len(found) > 1:
            preferred = [n for n in found.values() if n in self.preferred]
            if len(preferred) != 1:
                self.error(f"{name} is the beginning of {', '.join(found.values())}")
            return preferred[0] + equals + value
        return next(iter(found.values()), name) + equals + value

    def error(self, message: str) -> NoReturn:
        if message.startswith(UNRECOGNIZED):
            message += f" (this engine does not have them; {self._advice(message)})"
        # One line: the usage of all flags would push the reason off the screen.
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _advice(self, message: str) -> str:
        """Return advice about the unknown flags in `message`."""
        known = [
            name
            for name, action in self._option_string_actions.items()
            if action.help is not argparse.SUPPRESS
        ]
        asked = message.removeprefix(UNRECOGNIZED).split()
        near = [
            match
            for flag in asked
            if flag.startswith("--")
            for match in (
                difflib.get_close_matches(flag.partition("=")[0], known, n=1)
                or [name for name in known if name.startswith(flag)][:1]
            )
        ]
        meant = f"did you mean {', '.join(near)}? " if near else ""
        return f"{meant}--help lists every flag it has"


def flag_name(field_name: str) -> str:
    """Return the flag of a field: `num_prompts` -> `--num-prompts`."""
    return "--" + field_name.replace("_", "-")


@cache
def declared_fields(cls: type) -> tuple[Declared, ...]:
    """Return the fields of the dataclass `cls` that carry an `Arg`, in their order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found: list[Declared] = []
    group = None
    for field in dataclasses.fields(cls):
        if typing.get_origin(hints[field.name]) is typing.Annotated:
            kind, arg = typing.get_args(hints[field.name])[:2]
            group = arg.begins or group
            found.append(Declared(field, kind, arg, group))
    return tuple(found)


def add_fields(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add one `--flag` per declared field of the dataclass `cls`, in its group."""
    target: argparse._ActionsContainer = parser
    for declared in declared_fields(cls):
        if declared.arg.begins is not None:
            target = parser.add_argument_group(declared.arg.begins)
        target.add_argument(declared.flag, *declared.arg.aliases, **_options(declared))


def settle_choices(args: object) -> None:
    """Replace words in the dataclass `args` by the choices they mean."""
    cls: type = type(args)
    for declared in declared_fields(cls):
        value = getattr(args, declared.field.name)
        meant = declared.choice_meant(value)
        if meant is not value:
            setattr(args, declared.field.name, meant)


def check_values(args: object) -> None:
    """Check every declared field of the dataclass `args` against its `Arg`.

    Raises:
        ValueError: names the flag, its value and the allowed values.
    """
    cls: type = type(args)
    for declared in declared_fields(cls):
        value = getattr(args, declared.field.name)
        if value is not None:
            check_value(declared.flag, value, declared.arg)


def from_namespace(cls: type, namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the constructor arguments of `cls` read by the parser."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    return {name: value for name, value in vars(namespace).items() if name in names}


def check_value(name: str, value: Any, arg: Arg) -> None:
    """Check a value that is not None.

    Args:
        name: the flag or argument, for the message.

    Raises:
        ValueError: names it, its value and the allowed values.
    """
    if arg.choices is not None and value not in arg.choices:
        raise ValueError(
            f"{name} {value!r} is unknown; choose from {', '.join(arg.choices)}"
        )
    if arg.low is not None and value < arg.low:
        raise ValueError(f"{name} {value} must be at least {arg.low}")
    if arg.high is not None and value > arg.high:
        raise ValueError(f"{name} {value} must be at most {arg.high}")


def _options(declared: Declared) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument`."""
    arg = declared.arg
    if declared.kind is bool:
        return {"action": "store_true", "help": arg.help}
    options: dict[str, Any] = {"default": declared.field.default, "help": arg.help}
    if declared.is_list:
        options["nargs"] = "+"
    options["type"] = declared.entry_kind
    if arg.choices is not None:
        words = (synonym.word for synonym in arg.synonyms)
        options["choices"] = (*arg.choices, *words, *declared.off_words)
        options["metavar"] = "{" + ",".join(arg.choices) + "}"
    return options


def _strip_none(kind: Any) -> Any:
    """`X | None` -> `X`."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return kind
    return next(k for k in typing.get_args(kind) if k is not type(None))
