"""One operation with up to three implementations, chosen by where its data lies.

The only module that knows whether the native kernels (`sglang_kernels`) and Triton are
there. It knows nothing of any operation.
"""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

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


class Placed(Protocol):
    """Data on one device, such as a tensor."""

    @property
    def is_cpu(self) -> bool: ...

    @property
    def is_cuda(self) -> bool: ...


class _Backend:
    """A way to implement operations that may be absent.

    Attributes:
        reason: why it is not used; empty where it is.
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
        """Say once why it is not used, where it is not."""
        if self.reason and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s are not used (%s). %s", self._name, self._reason, self._hint
            )

    def load(self, path: str) -> Callable[..., Any] | None:
        """The function at `module:function`, or None and one warning."""
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
_ops: weakref.WeakSet[Op[..., Any]] = weakref.WeakSet()
_is_forced = False


class Op(Generic[P, R]):
    """An operation with the signature and the docstring of its torch reference.

    Data on the CPU goes to the native implementation, on a CUDA device to the Triton
    one, and everything else to the reference. Where that implementation is missing or
    not installed, the reference runs, after one warning.

    Args:
        reference: in torch; the others must equal it.
        triton, native: `module:function` with the parameters of `reference`; imported
            at the first call, so that neither needs to be installed.
        place: the argument that says where the data lies; None: the first one.
    """

    def __init__(
        self,
        *,
        reference: Callable[P, R],
        triton: str | None = None,
        native: str | None = None,
        place: Callable[P, Placed] | None = None,
    ) -> None:
        self.reference = reference
        self.triton = triton
        self.native = native
        self._place = place
        self._on_cpu: Callable[P, R] | None = None
        self._on_cuda: Callable[P, R] | None = None
        functools.update_wrapper(cast(Any, self), reference)
        _ops.add(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        place: Any = args[0] if self._place is None else self._place(*args, **kwargs)
        if place.is_cpu:
            run = self._on_cpu or self._bind_cpu()
        elif place.is_cuda:
            run = self._on_cuda or self._bind_cuda()
        else:
            run = self.reference
        return run(*args, **kwargs)

    def _bind_cpu(self) -> Callable[P, R]:
        self._on_cpu = self._bound(_native, self.native)
        return self._on_cpu

    def _bind_cuda(self) -> Callable[P, R]:
        self._on_cuda = self._bound(_triton, self.triton)
        return self._on_cuda

    def _bound(self, backend: _Backend, path: str | None) -> Callable[P, R]:
        if path is None or _is_forced:
            return self.reference
        return backend.load(path) or self.reference

    def unbind(self) -> None:
        """Choose again at the next call."""
        self._on_cpu = self._on_cuda = None


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
    """Run CPU ops on their references; the warning says why."""
    _native.switch_off(reason)
    _unbind_all()


@contextmanager
def force_reference() -> Iterator[None]:
    """Scope in which every op runs its torch reference. For tests and benchmarks."""
    global _is_forced
    before, _is_forced = _is_forced, True
    _unbind_all()
    try:
        yield
    finally:
        _is_forced = before
        _unbind_all()


def _unbind_all() -> None:
    for op in list(_ops):
        op.unbind()
