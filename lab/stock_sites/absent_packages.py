"""Stand-ins for packages that a stock engine imports and a text model never calls.

Engines import packages that are large, compiled, or both. The ones that are not
installed become modules whose attributes are all uncallable classes. Installed packages
are unchanged.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns:
    """The packages of one engine.

    Fields:
        packages: top-level names. What the engine itself can do without is not among
            them: it asks whether that is there, and would believe that it is.
        without: parts that a stand-in lacks.
        switches: of packages that some modules import without a question and others ask
            for: the variable and the value that say that they are not there.
        functions: functions that are called, and our modules that have them, by part.
        modules: parts of installed packages that are replaced, too: they ask for what
            is compiled when they are imported.
    """

    packages: frozenset[str]
    without: frozenset[str] = frozenset()
    switches: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    functions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()


class _Absent(type):
    """Metaclass of the classes that replace a package's contents."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_stands_in"):
            raise RuntimeError(
                f"{cls.__module__}.{cls.__qualname__}: this package is not installed"
            )
        return super().__call__(*args, **kwargs)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _any_schema(source: Any, handler: Any) -> Any:
    """Return a schema for any value, because Pydantic models have fields of these
    types.
    """
    return importlib.import_module("pydantic_core.core_schema").any_schema()


def _absent(module: str, name: str) -> Any:
    body = {
        "__module__": module,
        "__get_pydantic_core_schema__": staticmethod(_any_schema),
        "_stands_in": True,
    }
    return _Absent(name, (), body)


class _Module(types.ModuleType):
    def __init__(self, name: str, functions: Mapping[str, str]) -> None:
        super().__init__(name)
        self.__functions = functions

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ours = self.__functions.get(name)
        value = (
            _absent(self.__name__, name)
            if ours is None
            else getattr(importlib.import_module(ours), name)
        )
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The import finder of the stand-ins, asked last."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        of = self._stand_ins
        if fullname.partition(".")[0] not in of.packages or fullname in of.without:
            return None
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is not None and not isinstance(parent, _Module):
            # A submodule that an installed package does not have.
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name, self._stand_ins.functions.get(spec.name, {}))

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: there is no code to run."""


def _is_absent(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is None or isinstance(spec.loader, _Finder)


def stand_in(stand_ins: StandIns) -> None:
    """Install the finder once."""
    for package, (variable, value) in stand_ins.switches.items():
        if _is_absent(package):
            os.environ.setdefault(variable, value)
    for name in stand_ins.modules:
        sys.modules.setdefault(name, _Module(name, {}))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(stand_ins))
