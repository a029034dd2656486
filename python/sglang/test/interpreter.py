"""Triton's interpreter, made cheaper for tests: what it computes stays the same."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

MODULE = "triton.runtime.interpreter"


class _Unchanged:
    """In place of a patch's scope: there is nothing to restore."""

    def restore(self) -> None: ...


def patch_once() -> None:
    """Exchange the functions of `triton.language` for interpreted ones once per kernel
    and process, where Triton is imported.

    The interpreter does so at each launch, which restores them, and again at each call
    of a kernel's helper, which does not: searching the modules for functions takes
    half the time of a kernel with helpers.
    """
    interpreter: Any = sys.modules.get(MODULE)
    if interpreter is None or hasattr(interpreter._patch_lang, "cache_info"):
        return
    patch: Callable[[Callable[..., Any]], object] = interpreter._patch_lang

    @functools.cache
    def patch_first(function: Callable[..., Any]) -> _Unchanged:
        patch(function)
        return _Unchanged()

    interpreter._patch_lang = patch_first
