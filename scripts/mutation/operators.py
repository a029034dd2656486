"""One-line faults that a person might make between a request and its answer.

An operator gets a site and yields the replacements of its node.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

from scripts.mutation import row_operators
from scripts.mutation.roles import (
    ATTRIBUTES,
    KEYWORD_PAIRS,
    NO_DROP,
    are_alike,
    find_siblings,
)
from scripts.mutation.sites import FUNCTIONS, Edit, Site

Operator = Callable[[Site], Iterator[Edit]]

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


def _number(node: ast.AST) -> int | None:
    """Return the value of an integer literal, including a minus sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def constants(site: Site) -> Iterator[Edit]:
    """An integer of arithmetic, a comparison, an index or an assignment, off by one."""
    node, parent = site.node, site.parent
    value = _number(node)
    if value is None or isinstance(parent, ast.UnaryOp):
        return
    is_here = isinstance(
        parent,
        ast.BinOp | ast.Compare | ast.Slice | ast.Assign | ast.AugAssign | ast.Return,
    )
    is_index = isinstance(parent, ast.Subscript) and parent.slice is node
    assert isinstance(node, ast.expr)
    if is_index:
        # The last instead of the first, and vice versa.
        yield node, str({0: -1, -1: 0}.get(value, value - 1))
    if is_here or is_index:
        yield node, str(value + 1)
    if is_here:
        yield node, str(value - 1)


def arithmetic(site: Site) -> Iterator[Edit]:
    """`+` for `-`, `-` for `+`."""
    node = site.node
    if not isinstance(node, ast.BinOp | ast.AugAssign):
        return
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
        if any(isinstance(n, ast.List | ast.ListComp | ast.Tuple) for n in sides):
            return
    swapped = {ast.Add: ast.Sub, ast.Sub: ast.Add}.get(type(node.op))
    if swapped is not None:
        changed = copy.copy(node)
        changed.op = swapped()
        yield node, ast.unparse(changed)


def comparisons(site: Site) -> Iterator[Edit]:
    """A comparison off by one, or inverted."""
    node = site.node
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        swapped = COMPARED.get(type(node.ops[0]))
        if swapped is not None:
            yield (
                node,
                ast.unparse(ast.Compare(node.left, [swapped()], node.comparators)),
            )


def conditions(site: Site) -> Iterator[Edit]:
    """A negated condition of a statement, an expression or a comprehension."""
    node = site.node
    tests: list[ast.expr] = []
    if isinstance(node, ast.If | ast.IfExp):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield test, ast.unparse(test.operand)
        else:
            yield test, f"not ({ast.unparse(test)})"


def connectives(site: Site) -> Iterator[Edit]:
    """`and` for `or`, `or` for `and`."""
    node = site.node
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, ast.unparse(ast.BoolOp(other, node.values))


def extremes(site: Site) -> Iterator[Edit]:
    """The smaller instead of the larger of two, and vice versa."""
    pairs = {"min": "max", "maximum": "minimum"}
    pairs |= {after: before for before, after in pairs.items()}
    node = site.node
    if not isinstance(node, ast.Call):
        return
    function = node.func
    if isinstance(function, ast.Name) and function.id in pairs:
        yield function, pairs[function.id]
    elif isinstance(function, ast.Attribute) and function.attr in pairs:
        yield function, f"{ast.unparse(function.value)}.{pairs[function.attr]}"


def dropped(site: Site) -> Iterator[Edit]:
    """A statement left out: a call, a step of a counter, a write to an object."""
    node = site.node
    if isinstance(node, ast.Expr):
        is_plain = isinstance(node.value, ast.Call) and not _is_super(node.value)
    elif isinstance(node, ast.Assign):
        target = node.targets[0]
        is_plain = isinstance(target, ast.Subscript) or (
            isinstance(target, ast.Attribute) and site.function != "__init__"
        )
    else:
        is_plain = isinstance(node, ast.AugAssign)
    if is_plain:
        assert isinstance(node, ast.stmt)
        yield node, "pass"


def _is_super(node: ast.Call) -> bool:
    return any(name in ast.unparse(node.func) for name in NO_DROP)


def swapped(site: Site) -> Iterator[Edit]:
    """Two adjacent arguments of one role, or a keyword pair, swapped."""
    node = site.node
    if not isinstance(node, ast.Call):
        return
    for i in range(len(node.args) - 1):
        if are_alike(_role(node.args[i]), _role(node.args[i + 1])):
            changed = copy.copy(node)
            changed.args = list(node.args)
            changed.args[i], changed.args[i + 1] = node.args[i + 1], node.args[i]
            yield node, ast.unparse(changed)
    by_name = {k.arg: k for k in node.keywords if k.arg is not None}
    for first, second in KEYWORD_PAIRS:
        if first in by_name and second in by_name:
            values = {first: by_name[second].value, second: by_name[first].value}
            changed = copy.copy(node)
            changed.keywords = [
                ast.keyword(k.arg, values.get(k.arg or "", k.value))
                for k in node.keywords
            ]
            yield node, ast.unparse(changed)


def _role(node: ast.expr) -> str:
    """Return the name by which an argument is mistaken for another."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def siblings(site: Site) -> Iterator[Edit]:
    """Another local name of a related role."""
    node = site.node
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return
    if isinstance(site.parent, ast.Call) and site.parent.func is node:
        return
    bound = frozenset(n for n, line in site.names.items() if line < node.lineno)
    for other in find_siblings(node.id, bound):
        yield node, other


def attributes(site: Site) -> Iterator[Edit]:
    """Another field of a related role."""
    node = site.node
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        for other in ATTRIBUTES.get(node.attr, ()):
            yield node, f"{ast.unparse(node.value)}.{other}"


def slices(site: Site) -> Iterator[Edit]:
    """A bound of a slice off by one, or one more element left out at an open end."""
    node = site.node
    if isinstance(node, ast.Slice):
        for bound, sign in ((node.lower, "+"), (node.upper, "-")):
            if bound is not None and _number(bound) is None:
                yield bound, f"{ast.unparse(bound)} {sign} 1"
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice):
        return
    if isinstance(node.ctx, ast.Load):
        lower, upper = _text(node.slice.lower), _text(node.slice.upper)
        if not lower:
            yield node, f"{ast.unparse(node.value)}[1:{upper}]"
        if not upper:
            yield node, f"{ast.unparse(node.value)}[{lower}:-1]"


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def returned(site: Site) -> Iterator[Edit]:
    """A function that ends early: the rest is left out."""
    node, parent = site.node, site.parent
    is_body = isinstance(parent, FUNCTIONS) and isinstance(node, ast.stmt)
    if not is_body or site.returns_value or site.function == "__init__":
        return
    assert isinstance(parent, FUNCTIONS) and isinstance(node, ast.stmt)
    if node in parent.body[1:-1] and not isinstance(node, ast.Return):
        yield node, "return"


def skipped(site: Site) -> Iterator[Edit]:
    """A loop that leaves out its first element."""
    node = site.node
    if isinstance(node, ast.For | ast.comprehension):
        yield node.iter, f"list({ast.unparse(node.iter)})[1:]"


OPERATORS: dict[str, Operator] = {
    "constant": constants,
    "arithmetic": arithmetic,
    "comparison": comparisons,
    "condition": conditions,
    "connective": connectives,
    "extreme": extremes,
    "drop": dropped,
    "swap": swapped,
    "sibling": siblings,
    "attribute": attributes,
    "permute": row_operators.permuted,
    "roll": row_operators.rolled,
    "neighbour": row_operators.neighbours,
    "repeat": row_operators.repeated,
    "stale": row_operators.stale,
    "missing": row_operators.missing,
    "slice": slices,
    "span": row_operators.spans,
    "return": returned,
    "skip": skipped,
}
