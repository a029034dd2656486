"""Bounds white space in GBNF grammars, because a model might never leave it otherwise.

The same bound applies to JSON. The bounded language is a subset of the original.
"""

from __future__ import annotations

from sglang.srt.constrained.gbnf import (
    Chars,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    child_parts,
)

MAX_SPACE = 32
_SPACE = frozenset(map(ord, " \t\n\r\v\f"))


def with_bounded_space(name: str, body: Node) -> Node:
    """Return the body of a rule with white space repeated at most `MAX_SPACE` times, or
    as often as the rule requires.
    """
    one = _recursive_space(name, body)
    return Repeat(one, 0, MAX_SPACE) if one is not None else _bounded(body)


def _bounded(node: Node) -> Node:
    match node:
        case Repeat(item=item, low=low, high=None) if _is_space(item):
            return Repeat(item, low, max(low, MAX_SPACE))
        case Repeat(item=item, low=low, high=high):
            return Repeat(_bounded(item), low, high)
        case Sequence(items=items):
            return Sequence(tuple(map(_bounded, items)))
        case Choice(options=options):
            return Choice(tuple(map(_bounded, options)))
    return node


def _is_space(node: Node) -> bool:
    """Whether a part consists only of white space characters, at least one."""
    if isinstance(node, Chars):
        return all(
            high - low < len(_SPACE) and set(range(low, high + 1)) <= _SPACE
            for low, high in node.ranges
        )
    parts = child_parts(node) if isinstance(node, Sequence | Choice) else ()
    return bool(parts) and all(map(_is_space, parts))


def _recursive_space(name: str, body: Node) -> Node | None:
    """Return what a rule like `ws ::= ([ \\t\\n] ws)?` repeats, or None."""
    again: Node | None = None
    match body:
        case Repeat(item=item, low=0, high=1):
            again = item
        case Choice(options=(first, second)):
            empty = [one for one in (first, second) if _is_empty(one)]
            others = [one for one in (first, second) if not _is_empty(one)]
            again = others[0] if len(empty) == 1 else None
    match again:
        case Sequence(items=(space, Reference(name=same))):
            return space if same == name and _is_space(space) else None
    return None


def _is_empty(node: Node) -> bool:
    return isinstance(node, Sequence) and not any(
        not _is_empty(item) for item in node.items
    )
