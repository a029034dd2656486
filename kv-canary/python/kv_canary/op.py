"""One operation with up to three implementations, chosen by the device of its data.

The only module that knows whether the native kernels (`sglang_kernels`) and Triton are
installed. It knows nothing about any operation.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_NATIVE_HINT = (
    "CPU ops run on their torch references, which are several times slower. "
    "For the native kernels install a C++17 compiler (g++) and then run "
    "`pip install --no-build-isolation ./sgl-kernel`."
)
_TRITON_HINT = (
    "CUDA ops run on their torch references, which are several times slower. "
    "Install them with `pip install triton`."
)


class _Backend:
    """A way to implement operations, which may be unavailable.

    Attributes:
        reason: why it is not used; empty if it is.
    """

    def __init__(self, name: str, probe: Callable[[], str], hint: str) -> None:
        self._name = name
        self._probe: Callable[[], str] | None = probe
        self._hint = hint
        self._reason = ""
        self._has_warned = False

    @property
    def reason(self) -> str:
        if self._probe is not None:
            self._reason, self._probe = self._probe(), None
        return self._reason

    def switch_off(self, reason: str) -> None:
        self._reason, self._probe = reason, None

    def warn(self) -> None:
        """Warn once why it is not used, if it is not."""
        if self.reason and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s are not used (%s). %s", self._name, self._reason, self._hint
            )

    def load(self, path: str) -> Callable[..., Any] | None:
        """Return the function at `module:function`, or None after one warning."""
        if self.reason:
            self.warn()
            return None
        module, _, name = path.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found


def _probe_native() -> str:
    try:
        importlib.import_module("sglang_kernels.ops")
    except ImportError as error:
        return str(error)
    return ""


def _probe_triton() -> str:
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return str(error)
    return ""


_native = _Backend("Native CPU kernels", _probe_native, _NATIVE_HINT)
_triton = _Backend("Triton kernels", _probe_triton, _TRITON_HINT)
_ops: list[Op[..., Any]] = []
_is_forced = False


class Op(Generic[P, R]):
    """An operation with the signature and the docstring of its torch reference.

    Data on the CPU goes to the native implementation, data on a CUDA device to the
    Triton one. Everything else goes to the reference, as does any data whose
    implementation is missing or not installed, which one warning reports.

    At run time an op is a function with these attributes, generated from the signature.
    An instance that passes on `*args, **kwargs` costs 0.26 us more per call, which adds
    up to 2 % of a small model's step on the CPU.

    Args:
        reference: the torch function that the others must equal.
        triton, native: `module:function` with the parameters of `reference`; imported
            at the first call, so that neither needs to be installed.
        place: an expression in the parameters for the data whose device decides.
            Defaults to the first parameter.
    """

    reference: Callable[P, R]
    triton: str | None
    native: str | None
    unbind: Callable[[], None]
    """Choose again at the next call."""

    def __new__(
        cls,
        *,
        reference: Callable[P, R],
        triton: str | None = None,
        native: str | None = None,
        place: str | None = None,
    ) -> Op[P, R]:
        name = reference.__name__.removesuffix("_ref")
        scope: dict[str, Any] = {"_reference": reference}
        exec(_source(name, inspect.signature(reference), place, scope), scope)
        op: Any = functools.update_wrapper(scope[name], reference)

        def unbind() -> None:
            scope["_on_cpu"] = _first_call(scope, "_on_cpu", _native, native)
            scope["_on_cuda"] = _first_call(scope, "_on_cuda", _triton, triton)

        op.reference, op.triton, op.native, op.unbind = (
            reference,
            triton,
            native,
            unbind,
        )
        unbind()
        _ops.append(op)
        made: Op[P, R] = op
        return made

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        raise NotImplementedError("for type checkers: an op is a function")


def _source(
    name: str, signature: inspect.Signature, place: str | None, scope: dict[str, Any]
) -> str:
    """Return the source of a function that passes its arguments to the implementation
    for their device. Parameter defaults are put into `scope`."""
    declared: list[str] = []
    passed: list[str] = []
    for parameter in signature.parameters.values():
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if is_keyword and "*" not in declared:
            declared.append("*")
        default = ""
        if parameter.default is not parameter.empty:
            default = f"=_default_{parameter.name}"
            scope[f"_default_{parameter.name}"] = parameter.default
        declared.append(parameter.name + default)
        passed.append(
            f"{parameter.name}={parameter.name}" if is_keyword else parameter.name
        )
    place = place or next(iter(signature.parameters))
    arguments = ", ".join(passed)
    return (
        f"def {name}({', '.join(declared)}):\n"
        f"    if {place}.is_cpu:\n"
        f"        return _on_cpu({arguments})\n"
        f"    if {place}.is_cuda:\n"
        f"        return _on_cuda({arguments})\n"
        f"    return _reference({arguments})\n"
    )


def _first_call(
    scope: dict[str, Any], slot: str, backend: _Backend, path: str | None
) -> Callable[..., Any]:
    """Return a function that binds the implementation in `scope[slot]` and runs it."""

    def bind(*args: Any, **kwargs: Any) -> Any:
        run = None
        if path is not None and not _is_forced:
            run = backend.load(path)
        scope[slot] = run = run or scope["_reference"]
        return run(*args, **kwargs)

    return bind


def all_ops() -> Sequence[Op[..., Any]]:
    """Return the ops of all modules that were imported."""
    return tuple(_ops)


def native_available(*, warn: bool = False) -> bool:
    """Whether the native kernels are installed, switched on and not forced off."""
    if warn:
        _native.warn()
    return not (_is_forced or _native.reason)


def triton_available(*, warn: bool = False) -> bool:
    """Whether Triton is installed, torch has CUDA and references are not forced."""
    if warn:
        _triton.warn()
    return not (_is_forced or _triton.reason)


def switch_off_native(reason: str) -> None:
    """Run CPU ops on their references. The warning says why."""
    _native.switch_off(reason)
    _unbind_all()


@contextmanager
def force_reference() -> Iterator[None]:
    """Scope where every op runs its torch reference. For tests and benchmarks."""
    global _is_forced
    before, _is_forced = _is_forced, True
    _unbind_all()
    try:
        yield
    finally:
        _is_forced = before
        _unbind_all()


def _unbind_all() -> None:
    for op in _ops:
        op.unbind()
