"""Chooses, per call, between native CPU kernels, Triton kernels and torch references.

The only module of the engine that imports `sglang_kernels`, and the only one of the ops
that imports Triton. It knows nothing of any op.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kv_canary import op
from kv_canary.op import force_reference, native_available
from sglang.srt.environ import envs

__all__ = ["force_reference", "native_available"]

if not envs.SGLANG_NATIVE_KERNELS.get():
    op.switch_off_native("SGLANG_NATIVE_KERNELS=0")

# `sglang_kernels.ops`; None where it is not installed or switched off. To be used only
# where `use_native` says so.
native: Any = (
    importlib.import_module("sglang_kernels.ops") if op.native_available() else None
)


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


def use_native(tensor: torch.Tensor) -> bool:
    """Whether ops on `tensor` run natively: it lies on the CPU and the kernels exist.

    The first time a CPU tensor falls back for want of the kernels, one warning says so.
    """
    return tensor.is_cpu and op.native_available(warn=True)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether ops on `tensor` run as Triton kernels: it lies on a CUDA device and
    Triton is installed.

    The first time a CUDA tensor falls back for want of Triton, one warning says so.
    """
    return tensor.is_cuda and triton_ops is not None and op.triton_available(warn=True)
