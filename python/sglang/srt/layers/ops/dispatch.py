"""Chooses, per call, between the native CPU kernels and the torch references.

The only module of the engine that imports `sglang_kernels`. It knows nothing of any op.
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

_enabled = native is not None
_warned = False


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "Native CPU kernels are not used (%s). %s", _reason, _INSTALL_HINT
        )


def use_native(tensor: torch.Tensor) -> bool:
    """Whether ops on `tensor` run natively: it lies on the CPU and the kernels exist.

    The first time a CPU tensor falls back for want of the kernels, one warning says so.
    """
    if _enabled:
        return tensor.is_cpu
    if native is None and tensor.is_cpu:
        _warn_once()
    return False


def native_available() -> bool:
    """Whether the native kernels are installed, switched on and not forced off."""
    return _enabled


@contextmanager
def force_reference() -> Iterator[None]:
    """Inside, every op takes its torch reference. For tests and benchmarks."""
    global _enabled
    before = _enabled
    _enabled = False
    try:
        yield
    finally:
        _enabled = before
