"""The files that a reader opens to follow one function: a static walk of its calls.

A file is visited where one of its functions, methods or constructors is called, and
where a field or property of one of its classes is read, by the types that
`static_types.py` finds. A call of a global object enters its `__call__` and the
functions that its construction names. The walk ends at what has no such type: tensors,
callables in fields.
"""

from __future__ import annotations

import ast

from static_types import FUNCTIONS, Scope, Sources, Symbol, is_property


class CallWalk:
    """Follows the calls of one function, depth first and in order of evaluation.

    Attributes:
        stays: the modules entered, in the order of the first time.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._seen: set[Symbol] = set()
        self.stays: list[str] = []

    def enter(self, symbol: Symbol) -> None:
        """Walk a function, or the constructor of a class."""
        if symbol in self._seen or symbol.node is None:
            return
        self._seen.add(symbol)
        self._visit(symbol.module)
        if isinstance(symbol.node, ast.ClassDef):
            for name in ("__init__", "__post_init__"):
                found = self._sources.member(symbol, name)
                if found is not None:
                    self.enter(found)
            return
        scope = Scope(self._sources, symbol.module, symbol.node, self._owner_of(symbol))
        for statement in symbol.node.body:
            self._follow(statement, scope)

    def _visit(self, module: str) -> None:
        if module not in self.stays:
            self.stays.append(module)

    def _owner_of(self, symbol: Symbol) -> Symbol | None:
        for node in self._sources.tree(symbol.module).body:
            if isinstance(node, ast.ClassDef) and symbol.node in node.body:
                return Symbol(symbol.module, node)
        return None

    def _follow(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Call):
            for argument in (*node.args, *(k.value for k in node.keywords)):
                self._follow(argument, scope)
            if isinstance(node.func, ast.Attribute):
                self._follow(node.func.value, scope)
            self._call(node.func, scope)
            return
        for child in ast.iter_child_nodes(node):
            self._follow(child, scope)
        if isinstance(node, ast.Attribute):
            base = scope.infer(node.value)
            if base is not None and isinstance(base.node, ast.ClassDef):
                self._visit(base.module)
            found = scope.target(node)
            if found is not None and is_property(found.node):
                self.enter(found)

    def _call(self, function: ast.expr, scope: Scope) -> None:
        built = None
        if isinstance(function, ast.Name) and function.id not in scope.locals:
            built = self._sources.constructed(scope.module, function.id)
        called = scope.infer(function)
        if built is None:
            if called is not None:
                self.enter(called)
            return
        module, construction = built
        if called is not None and isinstance(called.node, ast.ClassDef):
            method = self._sources.member(called, "__call__")
            if method is not None:
                self.enter(method)
        given = Scope(self._sources, module)
        for value in (*construction.args, *(k.value for k in construction.keywords)):
            found = given.infer(value)
            if found is not None and isinstance(found.node, FUNCTIONS):
                self.enter(found)


def walk(sources: Sources, module: str, qualified: str) -> list[str]:
    """The modules of the walk that starts at `Class.method` or at a function.

    Raises:
        LookupError: `module` does not define it.
    """
    owner, _, method = qualified.rpartition(".")
    start = sources.resolve(module, owner or method)
    if owner and start is not None:
        start = sources.member(start, method)
    if start is None:
        raise LookupError(f"{module} does not define {qualified}")
    follower = CallWalk(sources)
    follower.enter(start)
    return follower.stays
