"""Converts GBNF to llguidance's Lark dialect, keeping the language llama.cpp gives it.

llguidance reads an output in lexemes, each as long as possible: if `[ \\t\\n]*` is
one lexeme, no "\\n" can follow it. Large lexemes are fast, so this finds the largest
regular parts of a grammar that may be lexemes: no text of the part may continue with a
character that could begin what follows. If a part may not be a lexeme, its own parts
are tried, down to single characters, which always may.

Which parts may meet is determined without the stack of rules: this may find more
meetings than really occur, so parts may be smaller than necessary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sglang.srt.constrained.gbnf import (
    REPEATS,
    Chars,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    SpecialToken,
    child_parts,
    normal_ranges,
    parse_gbnf,
)
from sglang.srt.constrained.gbnf_space import with_bounded_space
from sglang.srt.constrained.lexeme_meetings import Meetings

# Maximum characters of a lexeme, and nesting of rules and groups in it.
_MAX_LEXEME_SIZE = 400
_MAX_LEXEME_DEPTH = 60
# Maximum steps of the search for lexemes, about 0.5 s for the worst source; beyond them
# every character is a lexeme.
_MAX_STEPS = 300_000


class _TooManyStepsError(Exception):
    """The search for lexemes takes too long."""


def gbnf_to_lark(text: str) -> str:
    """Return the grammar in llguidance's dialect.

    Raises:
        ValueError: the source is not GBNF.
    """
    rules = {
        name: with_bounded_space(name, body) for name, body in parse_gbnf(text).items()
    }
    lexemes = Lexemes(rules)
    lexemes.choose()
    return _Writer(rules, lexemes).text()


class Lexemes:
    """The parts of a grammar that become lexemes."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._split: set[int] = set()
        self._is_single = False
        self._steps = 0
        # Rules that can be inlined: (size, depth).
        self._inlined: dict[str, tuple[int, int]] = {}
        self._measured: dict[int, tuple[int, int] | None] = {}
        self._find_inlined()

    def has(self, node: Node) -> bool:
        """Whether a part is a single lexeme."""
        if isinstance(node, Chars):
            return True
        if self._is_single or id(node) in self._split:
            return False
        return self._measured.get(id(node)) is not None

    def choose(self) -> None:
        """Split parts until no lexeme consumes what belongs to the next one."""
        try:
            while faulty := Meetings(self._rules, self.has, self._spend).faulty():
                self._split |= faulty
        except _TooManyStepsError:
            self._is_single = True

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise _TooManyStepsError

    def _find_inlined(self) -> None:
        """Measure rules after the rules they refer to; recursive rules are never
        inlined.
        """
        needs = {
            name: {node.name for node in _walk(body) if isinstance(node, Reference)}
            for name, body in self._rules.items()
        }
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        for name, needed in needs.items():
            for one in needed:
                users[one].append(name)
        ready = [name for name, needed in needs.items() if not needed]
        while ready:
            name = ready.pop()
            size = self._measure(self._rules[name])
            if size is None:
                continue
            self._inlined[name] = size
            for user in users[name]:
                needs[user].discard(name)
                if not needs[user]:
                    ready.append(user)
        for name, body in self._rules.items():
            if name not in self._inlined:
                self._measure(body)

    def _measure(self, node: Node) -> tuple[int, int] | None:
        """Return the size and depth of a part as a lexeme, or None if it cannot be
        one.
        """
        found: tuple[int, int] | None = None
        if isinstance(node, Chars):
            found = 1, 1
        elif isinstance(node, Reference):
            size = self._inlined.get(node.name)
            found = (size[0], size[1] + 1) if size else None
        elif not isinstance(node, SpecialToken):
            parts = [self._measure(part) for part in child_parts(node)]
            sizes = [part for part in parts if part is not None]
            if len(sizes) == len(parts):
                depth = 1 + max((depth for _, depth in sizes), default=0)
                found = sum(size for size, _ in sizes), depth
        if found and (found[0] > _MAX_LEXEME_SIZE or found[1] > _MAX_LEXEME_DEPTH):
            found = None
        self._measured[id(node)] = found
        return found


class _Writer:
    """Writes the reachable rules, and their lexemes as terminals."""

    def __init__(self, rules: Mapping[str, Node], lexemes: Lexemes) -> None:
        self._rules = rules
        self._lexemes = lexemes
        self._names = {"root": "start"}
        self._terminals: dict[str, str] = {}

    def text(self) -> str:
        lines: list[str] = []
        written = 0
        while written < len(self._names):
            rule, name = list(self._names.items())[written]
            lines.append(f"{name}: {self._rule(self._rules[rule])}")
            written += 1
        lines += [f"{name}: /{regex}/" for regex, name in self._terminals.items()]
        return "\n".join(["%llguidance {}", *lines, ""])

    def _rule(self, node: Node) -> str:
        if self._lexemes.has(node):
            regex = _regex(node, self._rules)
            if not regex:
                return '""'
            return self._terminals.setdefault(regex, f"T{len(self._terminals)}")
        match node:
            case Sequence():
                return " ".join(map(self._rule, node.items)) or '""'
            case Choice():
                return f"({' | '.join(map(self._rule, node.options))})"
            case Repeat():
                return f"({self._rule(node.item)}){_counts(node)}"
            case Reference():
                return self._names.setdefault(node.name, f"r{len(self._names)}")
            case SpecialToken():
                return node.text
        raise TypeError(f"{type(node).__name__} is no part of a rule")


def _regex(node: Node, rules: Mapping[str, Node]) -> str:
    match node:
        case Chars():
            return _char_class(node)
        case Reference():
            return _regex(rules[node.name], rules)
        case Repeat():
            return f"(?:{_regex(node.item, rules)}){_counts(node)}"
        case Choice():
            return f"(?:{'|'.join(_regex(one, rules) for one in node.options)})"
    return "".join(_regex(part, rules) for part in child_parts(node))


def _counts(node: Repeat) -> str:
    for sign, counts in REPEATS.items():
        if counts == (node.low, node.high):
            return sign
    high = "" if node.high is None else node.high
    return f"{{{node.low},{high}}}"


def _char_class(node: Chars) -> str:
    first, last = node.ranges[0]
    if len(node.ranges) == 1 and first == last:
        return _char(first)
    others = normal_ranges(node.ranges, is_negated=True)
    is_negated = len(others) < len(node.ranges)
    ranges = others if is_negated else node.ranges
    if not ranges:
        return "(?s:.)"
    inner = "".join(
        _char(low) if low == high else f"{_char(low)}-{_char(high)}"
        for low, high in ranges
    )
    return f"[{'^' if is_negated else ''}{inner}]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"


def _walk(node: Node) -> Iterator[Node]:
    """Yield a part and everything in it, without following rule references."""
    todo = [node]
    while todo:
        one = todo.pop()
        yield one
        todo += child_parts(one)
