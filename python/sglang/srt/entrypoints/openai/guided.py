"""vLLM's names for output constraints: `guided_...`, `structured_outputs`.

Each is one of the constraints of `SamplingParams`. Knows nothing about grammars.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.entrypoints.body_level import BodyLevel
from sglang.srt.entrypoints.neutral_fields import ANY, EMPTY, OFF, Neutral
from sglang.srt.managers.messages.errors import BadRequest

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import Sampled

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A constraint that a body asks for.

    Fields:
        path: path of the constraint in the body.
        kind: field of `SamplingParams`. source: its value.
    """

    path: str
    kind: str
    source: Any


def read_guide(body: Sampled) -> Guide | None:
    """Return the constraint under one of vLLM's names, if there is one.

    Raises:
        BadRequest: there are several, or one has the wrong type.
    """
    found = [
        _guide(name, name.removeprefix("guided_"), getattr(body, name))
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
    ]
    if body.structured_outputs is not None:
        level = BodyLevel(
            body.structured_outputs,
            "structured_outputs",
            read=tuple(_KINDS),
            neutral=_OTHERS,
        )
        found += [
            _guide(f"structured_outputs.{name}", name, level.get(name))
            for name in _KINDS
        ]
    guides = [guide for guide in found if guide is not None]
    if len(guides) > 1:
        names = " and ".join(guide.path for guide in guides)
        raise BadRequest(
            f"only one constraint of the output may be set, got {names}",
            param=guides[1].path,
        )
    return guides[0] if guides else None


def _guide(path: str, name: str, value: Any) -> Guide | None:
    kind, types, source = _KINDS[name]
    if value is None or value is False or value == "":
        return None
    if not isinstance(value, types):
        words = " or ".join(_TYPE_NAMES[each] for each in types)
        raise BadRequest(f"{path} must be {words}", param=path)
    return Guide(path=path, kind=kind, source=source(value, path))


def _same(value: Any, path: str) -> Any:
    return value


def _choice_regex(choices: list[Any], path: str) -> str:
    """Return the regular expression that matches exactly these texts."""
    if not choices or not all(isinstance(c, str) and c for c in choices):
        raise BadRequest(f"{path} must be a list of non-empty strings", param=path)
    return "|".join(f"(?:{re.escape(choice)})" for choice in choices)


_TYPE_NAMES = {str: "a string", dict: "an object", list: "a list", bool: "a boolean"}
# Name -> field of `SamplingParams`, types of the value, and conversion to the source.
_KINDS: Mapping[str, tuple[str, tuple[type, ...], Callable[[Any, str], Any]]] = {
    "json": ("json_schema", (dict, str), _same),
    "json_object": ("json_schema", (bool,), lambda value, path: ANY_OBJECT),
    "regex": ("regex", (str,), _same),
    "choice": ("regex", (list,), _choice_regex),
    "grammar": ("ebnf", (str,), _same),
}
_OTHERS: dict[str, Neutral] = {
    "structural_tag": EMPTY,
    "whitespace_pattern": EMPTY,
    "disable_any_whitespace": OFF,
    "disable_additional_properties": OFF,
    # Fields that choose between backends; there is only one.
    "disable_fallback": ANY,
    "backend": ANY,
    "_backend": ANY,
    "_backend_was_auto": ANY,
}
