"""Makes Triton's interpreter cheaper for tests, without changing its results, except
for products of bfloat16, which it gets wrong."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

MODULE = "triton.runtime.interpreter"


class _Unchanged:
    """Replaces a patch's scope: there is nothing to restore."""

    def restore(self) -> None: ...


def make_cheaper() -> None:
    """Remove costs without effect from the interpreter, once per process, if Triton is
    imported.
    """
    interpreter: Any = sys.modules.get(MODULE)
    if interpreter is None or hasattr(interpreter._patch_lang, "cache_info"):
        return
    _patch_once(interpreter)
    _skip_unread_checks(interpreter)
    _look_types_up_once(interpreter)
    _widen_bfloat16(interpreter)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _describe_once(interpreter.tl.core)


def _patch_once(interpreter: Any) -> None:
    """Replace the functions of `triton.language` by interpreted ones once per kernel.

    The interpreter does so at each launch, which restores them, and again at each call
    of a kernel's helper, which does not: searching the modules for functions takes
    half the time of a kernel with helpers.
    """
    patch: Callable[[Callable[..., Any]], object] = interpreter._patch_lang

    @functools.cache
    def patch_first(function: Callable[..., Any]) -> _Unchanged:
        patch(function)
        return _Unchanged()

    interpreter._patch_lang = patch_first


def _skip_unread_checks(interpreter: Any) -> None:
    """Skip recomputing integer sums, differences and products in 64 bits.

    That is for an assertion used only in debug mode, and takes more than half the time
    of a kernel that adds up bytes.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _look_types_up_once(interpreter: Any) -> None:
    """Cache the numpy type of each Triton type, which otherwise builds a table of all
    types.
    """
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        found = known.get(name)
        if found is None:
            found = known[name] = look_up(kind)
        return found

    interpreter._get_np_dtype = np_dtype


def _widen_bfloat16(interpreter: Any) -> None:
    """Multiply matrices of bfloat16 as float32, which holds their products.

    The interpreter keeps bfloat16 as its bits, and would multiply those.
    """
    builder = type(interpreter.interpreter_builder)
    multiply = builder.create_dot
    core = interpreter.tl

    def widen(operand: Any) -> Any:
        if operand.dtype.scalar != core.bfloat16:
            return operand
        return interpreter.interpreter_builder.cast_impl(operand, core.float32)

    def create_dot(self: Any, a: Any, b: Any, *options: Any) -> Any:
        return multiply(self, widen(a), widen(b), *options)

    builder.create_dot = create_dot


def _describe_once(core: Any) -> None:
    """Cache the attributes of block types, and of tensors of each type.

    Every instruction makes both for its result: their names, checks and tuples of
    constants take three tenths of the time of a kernel of small tiles.
    """
    _keep_attributes(core.block_type, lambda element, shape: (element.name, *shape))
    _keep_attributes(core.tensor, lambda handle, kind: kind.name, own="handle")


def _keep_attributes(
    kind: Any, key: Callable[[Any, Any], Hashable], own: str = ""
) -> None:
    """Give instances of `kind` the attributes of the first instance with their key,
    except for the attribute `own`, which is the first argument.
    """
    describe: Callable[[Any, Any, Any], None] = kind.__init__
    known: dict[Hashable, dict[str, Any]] = {}

    def init(instance: Any, first: Any, second: Any) -> None:
        name = key(first, second)
        attributes = known.get(name)
        if attributes is None:
            describe(instance, first, second)
            known[name] = dict(instance.__dict__)
        else:
            instance.__dict__.update(attributes)
            if own:
                setattr(instance, own, first)

    kind.__init__ = init
