"""Plants a fault in an imported module by replacing the code of one function; every
holder of the function then runs the fault.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

from kv_canary.op import all_ops
from scripts.mutation.sites import Mutant


class NotPlantableError(Exception):
    """The running function cannot accept the code."""


class EquivalentError(Exception):
    """The fault compiles to the code that is already running."""


@contextmanager
def planted(mutant: Mutant, *, references: Sequence[str] = ()) -> Iterator[None]:
    """Scope in which the fault is planted.

    Args:
        references: modules whose ops run their torch references meanwhile.

    Raises:
        NotPlantableError, EquivalentError: nothing was done.
    """
    function = running_function(mutant.module, mutant.qualname)
    before = function.__code__
    after = compiled(mutant, before)
    if len(after.co_freevars) != len(before.co_freevars):
        raise NotPlantableError(f"{mutant.id}: other free variables")
    if _meaning(after) == _meaning(before):
        raise EquivalentError(mutant.id)
    with ExitStack() as stack:
        stack.enter_context(on_references(references))
        function.__code__ = after
        stack.callback(setattr, function, "__code__", before)
        yield


def running_function(module: str, qualname: str) -> FunctionType:
    """Return the function with that name in the imported module, without its
    wrappers.
    """
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = vars(found).get(name)
    # Decorators keep the wrapped function under one of these names.
    for _ in range(8):
        if isinstance(found, FunctionType) and found.__module__ == module:
            wrapped = getattr(found, "__wrapped__", None)
            if wrapped is None:
                return found
            found = wrapped
            continue
        found = _inner(found)
    raise NotPlantableError(f"{module}:{qualname} is no function")


def _inner(wrapper: Any) -> Any:
    if isinstance(wrapper, staticmethod | classmethod):
        return wrapper.__func__
    if isinstance(wrapper, property):
        return wrapper.fget
    if isinstance(wrapper, functools.cached_property):
        return wrapper.func
    return getattr(wrapper, "__wrapped__", None)


def compiled(mutant: Mutant, before: CodeType) -> CodeType:
    """Return the code object that replaces `before`."""
    module = compile(mutant.source, before.co_filename, "exec", dont_inherit=True)
    codes = [module]
    for name in mutant.qualname.split("."):
        codes = [c for code in codes for c in _inside(code) if c.co_name == name]
    # A property and its setter share a name.
    for code in codes:
        if code.co_firstlineno == before.co_firstlineno:
            return code
    raise NotPlantableError(f"{mutant.id}: {mutant.qualname} is not in the source")


def _inside(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _meaning(code: CodeType) -> tuple[object, ...]:
    """Return everything the interpreter uses, without line numbers."""
    consts = tuple(
        _meaning(c) if isinstance(c, CodeType) else (type(c), repr(c))
        for c in code.co_consts
    )
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return (code.co_code, consts, names)


@contextmanager
def on_references(modules: Sequence[str]) -> Iterator[None]:
    """Scope in which the ops of `modules`, and no others, run their references."""
    chosen = [op for op in all_ops() if op.reference.__module__ in modules]
    for op in chosen:
        scope = op.__globals__  # type: ignore[attr-defined]
        scope["_on_cpu"] = op.reference
    try:
        yield
    finally:
        for op in chosen:
            op.unbind()
