"""Regular parts of a GBNF grammar as automata over classes of characters.

Positions stand for the characters of a part (Glushkov's construction).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sglang.srt.constrained.gbnf import (
    Chars,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
)

# A repetition with more positions than this is treated as unlimited.
_MAX_UNROLLED = 256


class Alphabet:
    """Maps characters to mask bits: characters that no part of a grammar distinguishes
    share one bit.
    """

    def __init__(self, used: Iterable[Chars]) -> None:
        bounds = {0}
        for chars in used:
            for low, high in chars.ranges:
                bounds |= {low, high + 1}
        self._bounds = sorted(bounds)

    def __len__(self) -> int:
        return len(self._bounds)

    def mask(self, chars: Chars) -> int:
        mask = 0
        for low, high in chars.ranges:
            first = bisect_left(self._bounds, low)
            end = bisect_left(self._bounds, high + 1)
            mask |= (1 << end) - (1 << first)
        return mask


@dataclass(slots=True)
class Automaton:
    """A part of a grammar.

    Fields:
        first, last: positions that may begin and end a text of the part.
        follow: for each position, the positions that may come next.
        is_nullable: whether the part may be empty.
    """

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    follow: dict[int, list[int]] = field(default_factory=dict)
    is_nullable: bool = False


class AutomatonBuilder:
    """Builds automata with disjoint positions.

    Attributes:
        masks: for each position, the characters it stands for.
    """

    def __init__(self, rules: Mapping[str, Node], alphabet: Alphabet) -> None:
        self._rules = rules
        self._alphabet = alphabet
        self.masks: list[int] = []

    def build(self, node: Node) -> Automaton:
        """Return the automaton of a part without recursion or special tokens."""
        made = Automaton()
        made.first, made.last, made.is_nullable = self._add(node, made.follow)
        return made

    def _add(
        self, node: Node, follow: dict[int, list[int]]
    ) -> tuple[list[int], list[int], bool]:
        match node:
            case Chars():
                position = len(self.masks)
                self.masks.append(self._alphabet.mask(node))
                follow[position] = []
                return [position], [position], False
            case Reference():
                return self._add(self._rules[node.name], follow)
            case Choice():
                parts = [self._add(option, follow) for option in node.options]
                return (
                    [one for first, _, _ in parts for one in first],
                    [one for _, last, _ in parts for one in last],
                    any(is_nullable for _, _, is_nullable in parts),
                )
            case Repeat():
                return self._add_repeat(node, follow)
            case Sequence():
                return self._join(
                    (self._add(item, follow) for item in node.items), follow
                )
        raise TypeError(f"{type(node).__name__} has no automaton")

    def _add_repeat(
        self, node: Repeat, follow: dict[int, list[int]]
    ) -> tuple[list[int], list[int], bool]:
        before = len(self.masks)
        first, last, is_nullable = self._add(node.item, follow)
        size = len(self.masks) - before
        copies = node.low if node.high is None else node.high
        if copies == 0 and node.high == 0:
            return [], [], True
        if node.high is None or copies * size > _MAX_UNROLLED:
            for position in last:
                follow[position] += first
            return first, last, is_nullable or node.low == 0

        def parts() -> Iterator[tuple[list[int], list[int], bool]]:
            yield first, last, is_nullable or node.low == 0
            for i in range(1, copies):
                begin, end, is_empty = self._add(node.item, follow)
                yield begin, end, is_empty or i >= node.low

        return self._join(parts(), follow)

    @staticmethod
    def _join(
        parts: Iterable[tuple[list[int], list[int], bool]],
        follow: dict[int, list[int]],
    ) -> tuple[list[int], list[int], bool]:
        first: list[int] = []
        last: list[int] = []
        is_nullable = True
        for begin, end, is_empty in parts:
            for position in last:
                follow[position] += begin
            if is_nullable:
                first = first + begin
            last = last + end if is_empty else end
            is_nullable = is_nullable and is_empty
        return first, last, is_nullable
