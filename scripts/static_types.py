"""Finds the definitions that names and expressions of a tree mean, without running it.

Types come from annotations of parameters, fields, properties and results, and from
assignments (in the body, of `self.x` in `__init__`, of globals) by the type of the
right side; a result annotated `Any` has the type of what is returned. Of `a if c else
b` the first branch counts; a method is that of the annotated class, not of a subclass.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Symbol(NamedTuple):
    """A module (`node` is None), or a function or class that it defines."""

    module: str
    node: Definition | None


class Sources:
    """The parsed modules of a tree, and the names that they bind.

    Args:
        files: dotted name of each module -> its file.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self._trees: dict[str, ast.Module] = {}
        self._resolved: dict[tuple[str, str], Symbol | None] = {}

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            text = self.files[module].read_text(encoding="utf-8")
            self._trees[module] = ast.parse(text)
        return self._trees[module]

    def resolve(self, module: str, name: str) -> Symbol | None:
        """The meaning of a global `name` in `module`; a bound object means its class.

        Returns:
            None for a name of another distribution.
        """
        key = module, name
        if key not in self._resolved:
            # For a binding that names itself.
            self._resolved[key] = None
            self._resolved[key] = self._resolve(module, name)
        return self._resolved[key]

    def _resolve(self, module: str, name: str) -> Symbol | None:
        if f"{module}.{name}" in self.files:
            return Symbol(f"{module}.{name}", None)
        for node in self.tree(module).body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name:
                return Symbol(module, node)
            if isinstance(node, ast.Assign) and name in names_of(node.targets):
                bound = Scope(self, module)
                bound.bind(node.targets, node.value)
                return bound.locals.get(name)
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                return self.annotated(module, node.annotation)
        return self._imported(module, name)

    def constructed(self, module: str, name: str) -> tuple[str, ast.Call] | None:
        """The module and the expression that build a global object, if any does."""
        for node in self.tree(module).body:
            is_built = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            if is_built and name in names_of(node.targets):
                return module, node.value
            if isinstance(node, ast.ImportFrom) and node.module in self.files:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.constructed(node.module, alias.name)
        return None

    def _imported(self, module: str, name: str) -> Symbol | None:
        for node in ast.walk(self.tree(module)):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) != name:
                    continue
                if isinstance(node, ast.Import):
                    is_ours = alias.name in self.files
                    return Symbol(alias.name, None) if is_ours else None
                if node.module in self.files:
                    return self.resolve(node.module, alias.name)
                whole = f"{node.module}.{alias.name}"
                return Symbol(whole, None) if whole in self.files else None
        return None

    def annotated(self, module: str, annotation: ast.expr | None) -> Symbol | None:
        """The class that an annotation names; of a union the first of this tree."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            left = self.annotated(module, annotation.left)
            return left or self.annotated(module, annotation.right)
        if isinstance(annotation, ast.Name):
            found = self.resolve(module, annotation.id)
            is_class = found is not None and isinstance(found.node, ast.ClassDef)
            return found if is_class else None
        return None

    def member(self, owner: Symbol, name: str) -> Symbol | None:
        """The method `name` of a class, or the class of its field `name`."""
        assert isinstance(owner.node, ast.ClassDef)
        for node in owner.node.body:
            if isinstance(node, FUNCTIONS) and node.name == name:
                return Symbol(owner.module, node)
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                return self.annotated(owner.module, node.annotation)
        for node in owner.node.body:
            if isinstance(node, FUNCTIONS) and node.name == "__init__":
                found = self._set_in(Symbol(owner.module, node), owner, name)
                if found is not None:
                    return found
        for base in owner.node.bases:
            parent = self.annotated(owner.module, base)
            if parent is not None and parent != owner:
                found = self.member(parent, name)
                if found is not None:
                    return found
        return None

    def _set_in(self, init: Symbol, owner: Symbol, name: str) -> Symbol | None:
        assert init.node is not None
        for node in ast.walk(init.node):
            if isinstance(node, ast.AnnAssign):
                if ast.unparse(node.target) == f"self.{name}":
                    return self.annotated(init.module, node.annotation)
            elif isinstance(node, ast.Assign) and any(
                ast.unparse(target) == f"self.{name}" for target in node.targets
            ):
                return Scope(self, init.module, init.node, owner).infer(node.value)
        return None


class Scope:
    """The types of the names in one function, or of a module's own names.

    Args:
        function: None for a module.
        owner: the class whose method `function` is.
    """

    def __init__(
        self,
        sources: Sources,
        module: str,
        function: Definition | None = None,
        owner: Symbol | None = None,
    ) -> None:
        self._sources = sources
        self.module = module
        self.locals: dict[str, Symbol | None] = {}
        if not isinstance(function, FUNCTIONS):
            return
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args):
            self.locals[argument.arg] = sources.annotated(module, argument.annotation)
        for argument in arguments.kwonlyargs:
            self.locals[argument.arg] = sources.annotated(module, argument.annotation)
        if owner is not None and arguments.args:
            self.locals[arguments.args[0].arg] = owner
        # A right side may name what a later line binds, so that order does not matter
        # beyond one more round.
        for _ in range(2):
            for node in ast.walk(function):
                if isinstance(node, ast.Assign):
                    self.bind(node.targets, node.value)

    def bind(self, targets: list[ast.expr], value: ast.expr) -> None:
        for target in targets:
            if isinstance(target, ast.Name):
                self.locals[target.id] = self.infer(value)
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for left, right in zip(target.elts, value.elts, strict=False):
                    self.bind([left], right)
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
                called = self.infer(value.func)
                for place, left in enumerate(target.elts):
                    if isinstance(left, ast.Name):
                        self.locals[left.id] = called and self._result(called, place)

    def infer(self, node: ast.expr) -> Symbol | None:
        """The function, class or module that an expression names, or whose instance
        it is."""
        if isinstance(node, ast.Name):
            if node.id in self.locals:
                return self.locals[node.id]
            return self._sources.resolve(self.module, node.id)
        if isinstance(node, ast.Attribute):
            found = self.target(node)
            if found is not None and is_property(found.node):
                return self._result(found)
            return found
        if isinstance(node, ast.Call):
            called = self.infer(node.func)
            return called and self._result(called)
        if isinstance(node, ast.IfExp):
            return self.infer(node.body) or self.infer(node.orelse)
        return None

    def target(self, node: ast.Attribute) -> Symbol | None:
        """The definition of `x.name`: a property is itself here, not its type."""
        base = self.infer(node.value)
        if base is None or isinstance(base.node, FUNCTIONS):
            return None
        if base.node is None:
            return self._sources.resolve(base.module, node.attr)
        return self._sources.member(base, node.attr)

    def _result(self, called: Symbol, place: int | None = None) -> Symbol | None:
        """The type of what a call returns, or of one element of its tuple."""
        if not isinstance(called.node, FUNCTIONS):
            return called if called.node is not None else None
        returns = called.node.returns
        if returns is not None and "Any" not in ast.unparse(returns):
            return self._sources.annotated(called.module, returns)
        scope = Scope(self._sources, called.module, called.node)
        for node in ast.walk(called.node):
            value = node.value if isinstance(node, ast.Return) else None
            if place is not None:
                value = value.elts[place] if isinstance(value, ast.Tuple) else None
            found = scope.infer(value) if value is not None else None
            if found is not None:
                return found
        return None


def names_of(targets: list[ast.expr]) -> set[str]:
    """The names that an assignment binds."""
    nodes = (node for target in targets for node in ast.walk(target))
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def is_property(node: Definition | None) -> bool:
    return isinstance(node, FUNCTIONS) and any(
        "property" in ast.unparse(decorator) for decorator in node.decorator_list
    )
