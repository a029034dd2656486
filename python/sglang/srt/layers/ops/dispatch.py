"""Chooses, per call, between native CPU kernels, Triton kernels and torch references.

The only module of the engine that imports `sglang_kernels`, and the only one of the ops
that imports Triton. It knows nothing of any op.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

_INSTALL_HINT = (
    "CPU ops run on their torch references, which are several times slower. "
    "For the native kernels install a C++17 compiler (g++) and then run "
    "`pip install --no-build-isolation ./sgl-kernel`."
)


def _import_native() -> tuple[Any, str]:
    """The native ops, or None and the reason why they are not used."""
    if not envs.SGLANG_NATIVE_KERNELS.get():
        return None, "SGLANG_NATIVE_KERNELS=0"
    try:
        import sglang_kernels.ops as native_ops
    except ImportError as error:
        return None, str(error)
    return native_ops, ""


# `sglang_kernels.ops`; None where it is not installed or switched off. To be used only
# where `use_native` says so.
native, _reason = _import_native()


def _import_triton() -> tuple[Any, str]:
    """The Triton ops, or None and the reason why they are not used."""
    if torch.version.cuda is None:
        return None, "torch was built without CUDA"
    try:
        from sglang.srt.layers.triton_ops import exports
    except ImportError as error:
        return None, str(error)
    return exports, ""


# `sglang.srt.layers.triton_ops.exports`; None without CUDA or Triton. To be used only
# where `use_triton` says so.
triton_ops, _triton_reason = _import_triton()

_enabled = native is not None
_triton_enabled = triton_ops is not None
_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def use_native(tensor: torch.Tensor) -> bool:
    """Whether ops on `tensor` run natively: it lies on the CPU and the kernels exist.

    The first time a CPU tensor falls back for want of the kernels, one warning says so.
    """
    if _enabled:
        return tensor.is_cpu
    if native is None and tensor.is_cpu:
        _warn_once(f"Native CPU kernels are not used ({_reason}). {_INSTALL_HINT}")
    return False


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether ops on `tensor` run as Triton kernels: it lies on a CUDA device and
    Triton is installed.

    The first time a CUDA tensor falls back for want of Triton, one warning says so.
    """
    if _triton_enabled:
        return tensor.is_cuda
    if triton_ops is None and tensor.is_cuda:
        _warn_once(
            f"Triton kernels are not used ({_triton_reason}): CUDA ops run on their "
            "torch references, which are several times slower. "
            "Install them with `pip install triton`."
        )
    return False


def native_available() -> bool:
    """Whether the native kernels are installed, switched on and not forced off."""
    return _enabled


@contextmanager
def force_reference() -> Iterator[None]:
    """Inside, every op takes its torch reference. For tests and benchmarks."""
    global _enabled, _triton_enabled
    before = _enabled, _triton_enabled
    _enabled = _triton_enabled = False
    try:
        yield
    finally:
        _enabled, _triton_enabled = before
