"""Finds lexemes of a grammar that meet in an output, and the ones that consume too
much.

Ignores the stack of rules: a lexeme may be followed by anything that follows it in any
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sglang.srt.constrained.gbnf import (
    Chars,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    SpecialToken,
    child_parts,
)
from sglang.srt.constrained.lexeme_automaton import (
    Alphabet,
    Automaton,
    AutomatonBuilder,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Lexeme:
    """Lexemes of one automaton that may begin at the same character.

    Fields:
        places: mask of their places.
        next_chars: characters that may begin what comes after them.
    """

    automaton: Automaton
    places: int
    next_chars: int


class Meetings:
    """The lexemes at their places in the rules; sets of places are masks.

    Args:
        is_lexeme: whether a part is a lexeme.
        spend: called with amounts of work; raises if the total is too much.
    """

    def __init__(
        self,
        rules: Mapping[str, Node],
        is_lexeme: Callable[[Node], bool],
        spend: Callable[[int], None],
    ) -> None:
        self._rules = rules
        self._is_lexeme = is_lexeme
        self._spend = spend
        self._nodes: list[Node] = []
        self._index: dict[int, int] = {}
        self._reached = self._find_places()
        chars = [
            node
            for body in rules.values()
            for node in _walk(body)
            if isinstance(node, Chars)
        ]
        spend(sum(len(one.ranges) for one in chars))
        self._builder = AutomatonBuilder(rules, Alphabet(chars))
        self._automata = self._build()
        self._firsts: dict[str, tuple[int, bool]] = {}
        self._follow = [0] * len(self._nodes)
        self._rule_follow = dict.fromkeys(self._reached, 0)
        self._find_firsts()
        self._find_follow()
        self._first_chars = [self._start_chars(one) for one in self._automata]
        self._chars_after: dict[int, int] = {}

    def faulty(self) -> set[int]:
        """Return identities of parts that consume what belongs to the next lexeme, as
        far as a first pass finds them; empty if there are none.
        """
        start = self._firsts["root"][0]
        todo, seen = [start], {start}
        faulty: set[int] = set()
        while todo:
            for after in self._meet(todo.pop(), faulty):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return faulty

    # -- places ----------------------------------------------------------------------

    def _find_places(self) -> list[str]:
        """Number the lexemes in reachable rules, and return these rules."""
        reached, todo = {"root": None}, ["root"]
        while todo:
            parts = [self._rules[todo.pop()]]
            while parts:
                node = parts.pop()
                self._spend(1)
                if self._is_lexeme(node) or isinstance(node, SpecialToken):
                    self._index[id(node)] = len(self._nodes)
                    self._nodes.append(node)
                elif not isinstance(node, Reference):
                    parts += child_parts(node)
                elif node.name not in reached:
                    reached[node.name] = None
                    todo.append(node.name)
        return list(reached)

    def _build(self) -> list[Automaton | None]:
        """Build the automaton of each place, or None for a special token."""
        of_rules: dict[str, Automaton] = {}
        automata: list[Automaton | None] = []
        for node in self._nodes:
            if isinstance(node, SpecialToken):
                automata.append(None)
            elif isinstance(node, Reference):
                if node.name not in of_rules:
                    of_rules[node.name] = self._made(node)
                automata.append(of_rules[node.name])
            else:
                automata.append(self._made(node))
        return automata

    def _made(self, node: Node) -> Automaton:
        made = self._builder.build(node)
        self._spend(len(made.follow) + sum(map(len, made.follow.values())))
        return made

    def _start_chars(self, automaton: Automaton | None) -> int:
        chars = 0
        for position in automaton.first if automaton else ():
            chars |= self._builder.masks[position]
        return chars

    # -- what begins and what follows ------------------------------------------------

    def _find_firsts(self) -> None:
        self._firsts = {name: (0, False) for name in self._reached}
        changed = True
        while changed:
            changed = False
            for name in reversed(self._reached):
                found = self._first(self._rules[name])
                changed = changed or found != self._firsts[name]
                self._firsts[name] = found

    def _first(self, node: Node) -> tuple[int, bool]:
        """Return the places that may begin a part, and whether it may be empty."""
        self._spend(1)
        place = self._index.get(id(node))
        if place is not None:
            automaton = self._automata[place]
            return 1 << place, automaton is not None and automaton.is_nullable
        if isinstance(node, Reference):
            return self._firsts[node.name]
        places = 0
        if isinstance(node, Choice):
            parts = [self._first(option) for option in node.options]
            for first, _ in parts:
                places |= first
            return places, any(is_nullable for _, is_nullable in parts)
        for part in child_parts(node):
            first, is_nullable = self._first(part)
            places |= first
            if isinstance(node, Repeat):
                return places, is_nullable or node.low == 0
            if not is_nullable:
                return places, False
        return places, True

    def _find_follow(self) -> None:
        changed = True
        while changed:
            changed = False
            for name in self._reached:
                body, after = self._rules[name], self._rule_follow[name]
                changed = self._push(body, after) or changed

    def _push(self, node: Node, after: int) -> bool:
        """Tell a part what may follow it; returns whether that added anything."""
        self._spend(1)
        place = self._index.get(id(node))
        if place is not None:
            before, self._follow[place] = (
                self._follow[place],
                self._follow[place] | after,
            )
            return before != self._follow[place]
        if isinstance(node, Reference):
            before = self._rule_follow[node.name]
            self._rule_follow[node.name] |= after
            return before != self._rule_follow[node.name]
        if isinstance(node, Repeat):
            again = self._first(node.item)[0] if node.high != 1 else 0
            return self._push(node.item, after | again)
        changed = False
        for part in reversed(child_parts(node)):
            changed = self._push(part, after) or changed
            if isinstance(node, Sequence):
                first, is_nullable = self._first(part)
                after = first | after if is_nullable else first
        return changed

    # -- meetings --------------------------------------------------------------------

    def _meet(self, places: int, faulty: set[int]) -> Iterator[int]:
        """Follow all lexemes of `places` through their common characters; yield the
        places after each set of lexemes that may end together."""
        lexemes = self._of(places)
        for one in _bits(places):
            if self._automata[one] is None:
                yield self._follow[one]
        owner = {
            position: i
            for i, one in enumerate(lexemes)
            for position in one.automaton.follow
        }
        begin = [position for one in lexemes for position in one.automaton.first]
        self._spend(len(owner))
        seen: set[frozenset[int]] = set()
        todo = list(self._steps(begin))
        while todo:
            _, state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            ended = {
                owner[one] for one in state if one in lexemes[owner[one]].automaton.last
            }
            ahead = {
                following
                for one in state
                for following in lexemes[owner[one]].automaton.follow[one]
            }
            steps = list(self._steps(ahead))
            for chars, further in steps:
                alive = {owner[one] for one in further}
                for i in ended:
                    if chars & lexemes[i].next_chars:
                        self._blame(i, alive, lexemes, faulty)
            todo += steps
            after = 0
            for i in ended:
                after |= self._after(lexemes[i].places)
            if ended:
                yield after

    def _of(self, places: int) -> list[_Lexeme]:
        grouped: dict[int, tuple[Automaton, int]] = {}
        for place in _bits(places):
            self._spend(1)
            automaton = self._automata[place]
            if automaton is not None:
                _, so_far = grouped.get(id(automaton), (automaton, 0))
                grouped[id(automaton)] = automaton, so_far | 1 << place
        return [
            _Lexeme(automaton, same, self._place_chars(self._after(same)))
            for automaton, same in grouped.values()
        ]

    def _after(self, places: int) -> int:
        after = 0
        for place in _bits(places):
            after |= self._follow[place]
        return after

    def _place_chars(self, places: int) -> int:
        if places not in self._chars_after:
            chars = 0
            for place in _bits(places):
                self._spend(1)
                chars |= self._first_chars[place]
            self._chars_after[places] = chars
        return self._chars_after[places]

    def _steps(
        self, ahead: Iterator[int] | set[int] | list[int]
    ) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield (characters, positions they lead to)."""
        parts: list[tuple[int, list[int]]] = []
        for position in ahead:
            left = self._builder.masks[position]
            split: list[tuple[int, list[int]]] = []
            self._spend(1 + len(parts))
            for chars, positions in parts:
                if both := chars & left:
                    split.append((both, [*positions, position]))
                    left &= ~both
                    if chars != both:
                        split.append((chars & ~both, positions))
                else:
                    split.append((chars, positions))
            if left:
                split.append((left, [position]))
            parts = split
        for chars, positions in parts:
            yield chars, frozenset(positions)

    def _blame(
        self, ended: int, alive: set[int], lexemes: list[_Lexeme], faulty: set[int]
    ) -> None:
        """Choose what must be smaller: a lexeme that continues itself, else the lexemes
        that continue beyond its end.
        """
        for i in [ended] if ended in alive else alive:
            for place in _bits(lexemes[i].places):
                node = self._nodes[place]
                faulty.add(id(node))
                if isinstance(node, Reference):
                    faulty.add(id(self._rules[node.name]))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _walk(node: Node) -> Iterator[Node]:
    todo = [node]
    while todo:
        one = todo.pop()
        yield one
        todo += child_parts(one)
