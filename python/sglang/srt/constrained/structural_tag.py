"""Structural tags: free text in which some beginnings start constrained text.

Two forms, as SGLang and XGrammar document them:

    {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}
    {"format": {"type": "triggered_tags", "triggers": [...], "tags": [
        {"begin", "content": {"type": "json_schema", "json_schema"}, "end"}, ...]}}

The first form may have an `answer_schema`: then the whole output is constrained, to
structures only or to JSON of this schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_STRUCTURES = 512
_ANY_TEXT = "/(?s:.*)/"
# White space that models write between calls.
_BETWEEN = r"/[ \n]{0,2}/"
_TAGS = "triggered_tags"


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Text that is constrained once it has begun.

    Fields:
        begin: text that begins the structure, starting with a trigger.
        schema: schema of the JSON that follows.
        end: text that ends the structure.
        path: path of the schema, for errors.
    """

    begin: str
    schema: Any
    end: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    """Structures by the trigger that begins each.

    Fields:
        answer_schema: schema of an output without structures, or None for free text.
    """

    by_trigger: Mapping[str, Sequence[Structure]]
    answer_schema: Any = None

    def texts(self) -> Iterable[str]:
        """Every literal text that an output may need."""
        for structures in self.by_trigger.values():
            for one in structures:
                yield from (one.begin, one.end)


def parse_structural_tag(source: str) -> StructuralTag:
    """Read either form.

    Raises:
        ValueError: names the field.
    """
    try:
        given = json.loads(source)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError("it must be an object")
    structures, triggers = _from_format(given) if "format" in given else _plain(given)
    if not structures or len(structures) > _MAX_STRUCTURES:
        raise ValueError(
            f"{len(structures)} structures; there must be 1 to {_MAX_STRUCTURES}"
        )
    by_trigger: dict[str, list[Structure]] = {}
    for one in structures:
        found = [trigger for trigger in triggers if one.begin.startswith(trigger)]
        if not found:
            raise ValueError(f"begin {one.begin!r} begins with none of the triggers")
        by_trigger.setdefault(max(found, key=len), []).append(one)
    _refuse_ambiguous(triggers, "trigger")
    for group in by_trigger.values():
        _refuse_ambiguous([one.begin for one in group], "begin")
    answer = given.get("answer_schema")
    if not isinstance(answer, dict | bool | None):
        raise ValueError("answer_schema must be a JSON schema")
    return StructuralTag(by_trigger=by_trigger, answer_schema=answer)


def _plain(given: Mapping[str, Any]) -> tuple[list[Structure], list[str]]:
    _refuse_unknown(given, ("type", "structures", "triggers", "answer_schema"), "it")
    structures = []
    for i, one in enumerate(_list(given.get("structures"), "structures")):
        where = f"structures[{i}]"
        fields = _object(one, where)
        _refuse_unknown(fields, ("begin", "schema", "end", "name"), where)
        # This server names a tool's structure after the tool.
        name = fields.get("name")
        path = f"{where}.schema" if name is None else f"$defs.{name}"
        structures.append(_structure(fields, fields.get("schema"), where, path))
    return structures, _triggers(given.get("triggers"))


def _from_format(given: Mapping[str, Any]) -> tuple[list[Structure], list[str]]:
    _refuse_unknown(given, ("type", "format"), "it")
    form = _object(given["format"], "format")
    if form.get("type") != _TAGS:
        raise ValueError(f"format.type is {form.get('type')!r}; supported: {_TAGS}")
    if form.get("at_least_one") or form.get("stop_after_first"):
        raise ValueError("format.at_least_one and stop_after_first must be false")
    known = ("type", "triggers", "tags", "at_least_one", "stop_after_first")
    _refuse_unknown(form, known, "format")
    structures = []
    for i, one in enumerate(_list(form.get("tags"), "format.tags")):
        where = f"format.tags[{i}]"
        fields = _object(one, where)
        _refuse_unknown(fields, ("type", "begin", "content", "end"), where)
        content = _object(fields.get("content"), f"{where}.content")
        if content.get("type") != "json_schema":
            raise ValueError(
                f"{where}.content.type is {content.get('type')!r}; supported: "
                "json_schema"
            )
        _refuse_unknown(content, ("type", "json_schema"), f"{where}.content")
        path = f"{where}.content.json_schema"
        structures.append(_structure(fields, content.get("json_schema"), where, path))
    return structures, _triggers(form.get("triggers"))


def _structure(
    fields: Mapping[str, Any], schema: Any, where: str, path: str
) -> Structure:
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{path} must be a JSON schema")
    begin, end = fields.get("begin"), fields.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str) or not begin:
        raise ValueError(f"{where}.begin and end must be texts, begin not empty")
    return Structure(begin=begin, schema=schema, end=end, path=path)


def _triggers(value: Any) -> list[str]:
    triggers = _list(value, "triggers")
    if not all(isinstance(one, str) and one for one in triggers):
        raise ValueError("triggers must be texts that are not empty")
    return list(dict.fromkeys(triggers))


def _refuse_ambiguous(texts: Sequence[str], what: str) -> None:
    """Reject ambiguous texts: one that starts with another cannot be distinguished from
    it.
    """
    ordered = sorted(texts)
    for shorter, longer in zip(ordered, ordered[1:], strict=False):
        if longer.startswith(shorter):
            raise ValueError(f"{what} {longer!r} begins with {what} {shorter!r}")


def _refuse_unknown(
    given: Mapping[str, Any], known: tuple[str, ...], where: str
) -> None:
    for name in given:
        if name not in known and given[name] is not None:
            raise ValueError(
                f"{where} has the unknown field {name[:64]!r}; known: "
                f"{', '.join(known)}"
            )


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be a list that is not empty")
    return value


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    return value


def structural_tag_to_lark(
    tag: StructuralTag,
    *,
    prepare: Callable[[Any, str], str],
    special_ids: Mapping[str, int],
    free_ids: Sequence[int],
) -> str:
    """Return the grammar in llguidance's dialect.

    Args:
        prepare: returns the JSON text of the schema at a path.
        special_ids: ids of special tokens by their text. llguidance does not treat
            special tokens as text, so literals would not match them.
        free_ids: special tokens allowed in free text.
    """
    triggers = tag.by_trigger.keys()
    free = [one for one in free_ids if one not in map(special_ids.get, triggers)]
    rules = [f"t{i}" for i in range(len(triggers))]
    if tag.answer_schema is not None:
        bound = f"({' | '.join(rules)})"
        lines = [
            "%llguidance {}",
            f"start: {bound} ({_BETWEEN} {bound})* | answer",
            f"answer: %json {prepare(tag.answer_schema, 'answer_schema')}",
        ]
    else:
        rules += ["special"] if free else []
        lines = [
            "%llguidance {}",
            f"start: ({' | '.join(rules)})* tail",
            f"tail: {_ANY_TEXT}",
        ]
        if free:
            lines.append(f"special: {_ANY_TEXT} <[{_ranges(free)}]>")
    for i, (trigger, structures) in enumerate(tag.by_trigger.items()):
        options = []
        for j, one in enumerate(structures):
            name = f"s{i}_{j}"
            lines.append(f"{name}: %json {prepare(one.schema, one.path)}")
            begin = _literal(one.begin[len(trigger) :], special_ids)
            options.append(f"{begin} {name} {_literal(one.end, special_ids)}")
        if tag.answer_schema is not None:
            head = _literal(trigger, special_ids)
        elif trigger in special_ids:
            head = f"{_ANY_TEXT} <[{special_ids[trigger]}]>"
        else:
            lines.append(f"go{i}[lazy]: {_ANY_TEXT[:-1]}{_escaped(trigger)}/")
            head = f"go{i}"
        lines.append(f"t{i}: {head} ({' | '.join(options)})")
    return "\n".join([*lines, ""])


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Return the grammar that matches a text, which may contain special tokens."""
    for special, number in special_ids.items():
        if special in text:
            before, _, after = text.partition(special)
            return (
                f"{_literal(before, special_ids)} <[{number}]> "
                f"{_literal(after, special_ids)}"
            ).strip()
    return f"/{_escaped(text)}/" if text else ""


def _escaped(text: str) -> str:
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
        for char in text
    )


def _ranges(ids: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for one in sorted(ids):
        if parts and parts[-1][1] + 1 == one:
            parts[-1][1] = one
        else:
            parts.append([one, one])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in parts)
