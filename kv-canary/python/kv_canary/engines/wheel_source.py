"""Checks of a host engine that is only a wheel: names and signatures, read from its
source without importing or installing anything."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Sequence
from email import message_from_bytes
from functools import cache
from pathlib import Path
from typing import IO, TypeVar

from kv_canary.engines.hooks import AnyOf, Expectation, Hook, HookRecord

Named = TypeVar("Named", ast.ClassDef, ast.FunctionDef)


class WheelError(ValueError):
    """The file is not a wheel. The text names it and what was found."""


class WheelSource:
    """The Python source in a wheel.

    Args:
        path: the file, or one that is open.

    Raises:
        WheelError: it cannot be read as a wheel.
    """

    def __init__(self, path: Path | IO[bytes]) -> None:
        try:
            self._wheel = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise WheelError(f"{path}: {error}") from error
        self._names = set(self._wheel.namelist())
        found = [n for n in self._names if n.endswith(".dist-info/METADATA")]
        if len(found) != 1:
            raise WheelError(f"{path}: looked for one METADATA, found {len(found)}")
        metadata = message_from_bytes(self._wheel.read(found[0]))
        self.name, self.version = metadata["Name"], metadata["Version"]
        self._parse = cache(self._parse_module)

    def problem_with(self, expected: Expectation) -> str | None:
        """Return how the source differs from an expectation, or None; see
        `hooks.problem_with`."""
        if isinstance(expected, AnyOf):
            problems = [self.problem_with(hook) for hook in expected.hooks]
            return None if None in problems else ", and ".join(map(str, problems))
        module, _, name = expected.owner.partition(":")
        if self._parse(module) is None:
            return f"looked for {expected.owner}, found no module {module}"
        if self._find_class(module, name) is None:
            return f"looked for {expected.owner}, found no such class"
        if isinstance(expected, HookRecord):
            return self._problem_with_fields(expected, module, name)
        return self._problem_with_method(expected, module, name)

    def _problem_with_fields(
        self, expected: HookRecord, module: str, name: str
    ) -> str | None:
        names = {
            statement.target.id
            for owner in self._with_bases(module, name)
            for statement in owner.body
            if isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
        }
        missing = [field for field in expected.fields if field not in names]
        if not missing:
            return None
        return (
            f"looked for {expected.place} with {', '.join(missing)}, found "
            f"{', '.join(sorted(names))}"
        )

    def _problem_with_method(
        self, expected: Hook, module: str, name: str
    ) -> str | None:
        for owner in self._with_bases(module, name):
            method = _named(owner.body, ast.FunctionDef, expected.method)
            if method is None:
                continue
            arguments = [*method.args.posonlyargs, *method.args.args]
            found = tuple(each.arg for each in arguments)[1:]
            if found[: len(expected.parameters)] == expected.parameters:
                return None
            return (
                f"looked for {expected.place}({', '.join(expected.parameters)}, ...), "
                f"found ({', '.join(found)})"
            )
        return f"looked for {expected.place}, found no such method"

    def _with_bases(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        """Yield a class and then its bases, as far as the wheel has them."""
        found = self._find_class(module, name)
        if found is None:
            return
        where, owner = found
        yield owner
        for base in owner.bases:
            if isinstance(base, ast.Name):
                yield from self._with_bases(where, base.id)

    def _find_class(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return the module that defines a class, which `module` may only import, and
        its definition."""
        tree = self._parse(module)
        if tree is None:
            return None
        owner = _named(tree.body, ast.ClassDef, name)
        if owner is not None:
            return module, owner
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        return self._find_class(
                            self._imported(module, statement), alias.name
                        )
        return None

    def _imported(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the module that a statement of `module` imports from."""
        if not statement.level:
            return statement.module or ""
        parts = module.split(".")
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._names
        package = parts[: len(parts) + is_package - statement.level]
        return ".".join([*package, *filter(None, [statement.module])])

    def _parse_module(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in self._names:
                return ast.parse(self._wheel.read(name))
        return None


def _named(body: Sequence[ast.stmt], kind: type[Named], name: str) -> Named | None:
    """Return the last statement that defines `name`."""
    found = [each for each in body if isinstance(each, kind) and each.name == name]
    return found[-1] if found else None
