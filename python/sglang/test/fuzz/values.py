"""JSON values: those that a schema allows, and hostile ones.

Values are Python values, except `Literal`: JSON text that Python cannot represent, or
that is not JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

REFERENCE = "#/components/schemas/"
MAX_ITEMS = 3
LONG = 100_000


@dataclass(frozen=True, slots=True)
class Literal:
    """A value by its text in the body."""

    text: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """An object by its members, which may repeat a name."""

    members: tuple[tuple[str, Any], ...]


def encode(value: Any) -> str:
    """The JSON text of `value`; surrogates are escaped."""
    if isinstance(value, Literal):
        return value.text
    if isinstance(value, Pairs):
        return _braced(value.members)
    if isinstance(value, dict):
        return _braced(tuple(value.items()))
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    return json.dumps(value)


def _braced(members: tuple[tuple[str, Any], ...]) -> str:
    return "{" + ",".join(f"{json.dumps(k)}:{encode(v)}" for k, v in members) + "}"


NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 17, 255, 4095, 4096, 2**31 - 1, 2**31, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), -(2**63) - 1),
    *(-0.0, 0.1, 1.5, -1e-9, 5e-324, 1e-320, 1e30, 1e38, 1e39, 1.7e308),
    *map(Literal, ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999")),
    *map(Literal, ("1" + "0" * 400, "0x10", "01", "+1", "1.", ".5", "1_000", "--1")),
)
TEXTS: tuple[Any, ...] = (
    *("", " ", "\0", "\x1b[31m", "\r\n\r\n", "\u202e\u0301", "\ufeff", "\U0010ffff"),
    *("\ud800", "\udc00\ud800", "e\u0301" * 50, "👩‍👩‍👧‍👦" * 9, "a" * 257),
    *("{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}", "%s%n", "../../etc"),
    *("(a+)+$", "(" * 500, "a{1000}{1000}", "[^\\x00-\\x7f]*", "(?=a)", "(?P<a>.)\\1"),
    *('{"type": "object"}', '{"$ref": "#"}', "root ::= root", "start: start", "null"),
    *("<|endoftext|>", "</s>", "<s>", "data: [DONE]", "true", "1e5", "-1"),
    Literal('"' + "x" * LONG + '"'),
    Literal('"\\ud83d"'),
    Literal('"\\u0000\\uffff"'),
    Literal('"\x01\t\n"'),
    Literal('"unfinished'),
    Literal("'single'"),
)
STRUCTURES: tuple[Any, ...] = (
    *([], [[]], [None], {}, {"": None}, {"a": {"b": {"c": []}}}, [{}] * 9),
    Literal("[" * 400 + "]" * 400),
    Literal('{"a":' * 400 + "1" + "}" * 400),
    Literal("[" * 20_000 + "]" * 20_000),
    Literal("[" + ",".join(["1"] * LONG) + "]"),
    Literal("[" + ",".join(['"a"'] * 5000) + "]"),
    Literal("{" + ",".join(f'"{i}":{i}' for i in range(5000)) + "}"),
    Pairs((("type", 1), ("type", "object"), ("__proto__", {}))),
)
# Functions that build bulky values of a given size.
BULKS: tuple[Callable[[int], str], ...] = (
    lambda size: '"' + "word " * (size // 5) + '"',
    lambda size: '"' + "\\u00e9" * (size // 6) + '"',
    lambda size: "[" + "1," * (size // 2) + "1]",
    lambda size: "[" + "0.5," * (size // 4) + "1]",
    lambda size: "[" + "[]," * (size // 3) + "[]]",
    lambda size: "[" + '"a",' * (size // 4) + '"a"]',
    lambda size: "{" + ",".join(f'"{i}":0' for i in range(size // 11)) + "}",
    lambda size: "[" + '{"role":"user","content":"x"},' * (size // 30) + "{}]",
)
MAX_BULK_BITS = 24
_WORDS = ("a", "yes", "def f(x):", "1, 2,", "é", "The capital of", "auto", "none")
_ALPHABETS = (
    *("abc 123", "\0\x01\x1f\x7f\n\t", "äß€漢字🙂\u200d"),
    *("\ud800\udfff", "[]{}()*+?|\\"),
)


class Values:
    """Draws values of the types of an OpenAPI schema, and hostile ones."""

    def __init__(self, openapi: dict[str, Any], random: Random) -> None:
        self._components = openapi["components"]["schemas"]
        self._random = random

    def resolved(self, node: dict[str, Any]) -> dict[str, Any]:
        """`node`, or the component that it refers to."""
        name = node.get("$ref", "").removeprefix(REFERENCE)
        component: dict[str, Any] = self._components[name] if name else node
        return component

    def valid(self, node: dict[str, Any]) -> Any:
        """A value of the type `node`."""
        random = self._random
        node = self.resolved(node)
        if "anyOf" in node:
            return self.valid(random.choice(node["anyOf"]))
        if "enum" in node:
            return random.choice(node["enum"])
        kind = node.get("type", "any")
        if kind == "any":
            kind = random.choice(tuple(_SIMPLE))
        if kind == "array":
            items = node.get("items", {})
            return [self.valid(items) for _ in range(random.randint(0, MAX_ITEMS))]
        if kind == "object":
            return self._object(node)
        return _SIMPLE[kind](random)

    def some_members(self, node: dict[str, Any]) -> dict[str, Any]:
        """Up to `MAX_ITEMS` optional members of the object type `node`."""
        shown = self.resolved(node)
        members, required = shown["properties"], shown.get("required", ())
        # Fields that are not served have lists of values, and are many.
        optional = [
            name
            for name in members
            if name not in required
            for _ in range(1 if "enum" in members[name] else 4)
        ]
        count = self._random.randint(0, MAX_ITEMS) if optional else 0
        chosen = {self._random.choice(optional) for _ in range(count)}
        return {name: self.valid(members[name]) for name in sorted(chosen)}

    def widened(self, node: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        """Return `body` with further members, also in inner objects."""
        members = self.resolved(node)["properties"]
        wider = {**body, **self.some_members(node)}
        for name, value in body.items():
            kinds = members.get(name, {}).get("anyOf", [])
            refs = [kind for kind in kinds if "$ref" in kind]
            if refs and isinstance(value, dict) and wider[name] is value:
                wider[name] = {**value, **self.some_members(refs[0])}
        return wider

    def hostile(self) -> Any:
        """A value that few fields expect."""
        random = self._random
        source = random.choice((None, NUMBERS, TEXTS, STRUCTURES, NUMBERS, TEXTS))
        return self._noise(3) if source is None else random.choice(source)

    def bulky(self) -> Literal:
        """A value of 1 to 16 MiB."""
        size = 1 << self._random.randint(20, MAX_BULK_BITS)
        return Literal(self._random.choice(BULKS)(size))

    def _noise(self, depth: int) -> Any:
        """Any JSON, nested at most `depth` deep."""
        random = self._random
        kind = random.randint(0, 6 if depth else 4)
        if kind == 0:
            return random.choice((None, True, False))
        if kind == 1:
            return random.getrandbits(random.randint(1, 80)) * random.choice((1, -1))
        if kind == 2:
            return random.uniform(-1, 1) * 10 ** random.randint(-300, 300)
        if kind in (3, 4):
            return _noisy_text(random)
        entries = [self._noise(depth - 1) for _ in range(random.randint(0, 4))]
        if kind == 5:
            return entries
        return {_noisy_text(random): entry for entry in entries}

    def _object(self, shown: dict[str, Any]) -> dict[str, Any]:
        random = self._random
        if "properties" not in shown:
            extra = shown.get("additionalProperties")
            node = extra if isinstance(extra, dict) else {}
            return {
                str(random.randint(0, 300)): self.valid(node)
                for _ in range(random.randint(0, MAX_ITEMS))
            }
        must = {
            name: self.valid(shown["properties"][name])
            for name in shown.get("required", ())
        }
        return {**self.some_members(shown), **must}


def _noisy_text(random: Random) -> str:
    alphabet = random.choice(_ALPHABETS)
    return "".join(random.choices(alphabet, k=random.randint(0, 30)))


_SIMPLE: dict[str, Callable[[Random], Any]] = {
    "null": lambda random: None,
    "boolean": lambda random: random.random() < 0.5,
    "integer": lambda random: random.choice(
        (random.randint(0, 8), random.randint(-2, 300))
    ),
    "number": lambda random: random.choice((0, 1, random.uniform(0, 2))),
    "string": lambda random: random.choice((*_WORDS, _noisy_text(random))),
}
