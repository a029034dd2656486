"""Finds the places in a module where a fault may be planted, and makes the edit.

Reads sources with `ast`; knows no operators.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_CODE = {"__repr__", "__str__", "__post_init__"}
LOGS = {"logger", "logging", "warnings"}
# A node, and the source that replaces it.
Edit = tuple[ast.expr | ast.stmt, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault.

    Fields:
        module: dotted name.
        qualname: outermost function that contains it, as `Class.method`.
        line: first line of the edit.
        before, after: the edited piece of the source, in one line each.
        source: source of the whole module with the fault.
    """

    module: str
    qualname: str
    line: int
    operator: str
    before: str
    after: str
    source: str = field(repr=False)
    number: int = 0

    @property
    def id(self) -> str:
        """Stable while the module does not change."""
        return f"{self.module}:{self.line}:{self.operator}:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A node inside a function.

    Fields:
        parents: from the function's statement down to the node's parent.
        names: parameters and local names of the function, and where each is first
            bound, except in comprehensions.
        returns_value: whether the function returns or yields one.
    """

    node: ast.AST
    parents: tuple[ast.AST, ...]
    qualname: str
    names: dict[str, int]
    returns_value: bool

    @property
    def parent(self) -> ast.AST:
        return self.parents[-1]

    @property
    def statement(self) -> ast.AST:
        """The statement that contains the node, which may be the node itself."""
        chain = (*self.parents, self.node)
        return next(n for n in reversed(chain) if isinstance(n, ast.stmt))

    @property
    def function(self) -> str:
        return self.qualname.rpartition(".")[2]


def sites(tree: ast.Module) -> Iterator[Site]:
    """Yield all effective nodes of all functions, in source order."""
    for qualname, function in _functions(tree, ""):
        names = _local_names(function)
        returns = _returns_value(function)
        for node, parents in _walk(function.body, (function,)):
            yield Site(
                node=node,
                parents=parents,
                qualname=qualname,
                names=names,
                returns_value=returns,
            )


def _functions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The outermost functions with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, FUNCTIONS) and child.name not in NOT_CODE:
            yield prefix + child.name, child


def _walk(
    body: list[ast.stmt], parents: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    for statement in body:
        yield from _descend(statement, parents)


def _descend(
    node: ast.AST, parents: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    if is_skipped(node):
        return
    yield node, parents
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and (
            name != "args" or isinstance(value, ast.arguments)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _descend(child, (*parents, node))


def is_skipped(node: ast.AST) -> bool:
    """Whether to skip a node: docstrings, logging, assertions, and code that only
    rejects.
    """
    if isinstance(
        node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom
    ):
        return True
    if isinstance(node, ast.If) and not node.orelse:
        return isinstance(node.body[-1], ast.Raise)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_log(node.value)
    return False


def _is_log(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    return isinstance(owner, ast.Name) and owner.id in LOGS


def _local_names(function: ast.AST) -> dict[str, int]:
    found: dict[str, int] = {}
    inner: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.comprehension):
            inner |= {id(part) for part in ast.walk(node.target)}
        elif isinstance(node, ast.Lambda):
            inner |= {id(part) for part in ast.walk(node.args)}
    for node in ast.walk(function):
        is_bound = isinstance(node, ast.arg) or (
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        if is_bound and id(node) not in inner:
            assert isinstance(node, ast.arg | ast.Name)
            name = node.arg if isinstance(node, ast.arg) else node.id
            found[name] = min(node.lineno, found.get(name, node.lineno))
    return found


def _returns_value(function: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Return) and node.value is not None)
        or isinstance(node, ast.Yield | ast.YieldFrom)
        for node in ast.walk(function)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A parsed source, and the edits of its text.

    Fields:
        starts: offset in bytes of each line.
    """

    name: str
    text: bytes
    tree: ast.Module
    starts: tuple[int, ...]

    @classmethod
    def parse(cls, name: str, source: str) -> Module:
        text = source.encode()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return cls(name=name, text=text, tree=ast.parse(text), starts=tuple(starts))

    def edited(self, node: ast.expr | ast.stmt, replacement: str) -> str:
        """The source with `replacement` for a node; later lines keep their numbers."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        lost = "\n" * self.text[begin:end].count(b"\n")
        if isinstance(node, ast.expr):
            is_atom = isinstance(node, ast.Name | ast.Attribute | ast.Constant)
            if isinstance(node, ast.Slice):
                replacement += lost
            elif not is_atom:
                replacement = f"({replacement}{lost})"
        else:
            replacement += lost
        edited = self.text[:begin] + replacement.encode() + self.text[end:]
        return edited.decode()
