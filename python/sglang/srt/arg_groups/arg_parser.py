"""Generates a command line from the annotated fields of a dataclass.

A field declares itself once: `name: Annotated[type, Arg("help")] = default`.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn


@dataclasses.dataclass(frozen=True, slots=True)
class Arg:
    """The command line side of a field. `choices` None means any value; `aliases` are
    further flags of the same meaning."""

    help: str
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()


class FlagParser(argparse.ArgumentParser):
    """Exact flag names only; an unknown flag is refused, never ignored."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += (
                " (this engine does not have them; --help lists every flag it has)"
            )
        # One line: the usage of all flags would push the reason off the screen.
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_fields(parser: argparse.ArgumentParser, cls: type) -> None:
    """One `--flag` per field of the dataclass `cls` that carries an `Arg`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        annotation = hints[field.name]
        if typing.get_origin(annotation) is not typing.Annotated:
            continue
        base, arg = typing.get_args(annotation)[:2]
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            *arg.aliases,
            **_options(field, base, arg),
        )


def from_namespace(cls: type, namespace: argparse.Namespace) -> dict[str, Any]:
    """Constructor arguments of `cls` from what the parser read."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    return {name: value for name, value in vars(namespace).items() if name in names}


def _options(field: dataclasses.Field[Any], base: Any, arg: Arg) -> dict[str, Any]:
    if base is bool:
        return {"action": "store_true", "help": arg.help}
    options: dict[str, Any] = {"default": field.default, "help": arg.help}
    kind = _strip_none(base)
    if typing.get_origin(kind) is list:
        options["nargs"] = "+"
        kind = typing.get_args(kind)[0]
    options["type"] = kind
    if arg.choices is not None:
        options["choices"] = arg.choices
    return options


def _strip_none(base: Any) -> Any:
    """`X | None` -> `X`."""
    if typing.get_origin(base) not in (types.UnionType, typing.Union):
        return base
    kinds: Sequence[Any] = [k for k in typing.get_args(base) if k is not type(None)]
    return kinds[0]
