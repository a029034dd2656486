"""Finds the Triton launchers of the tree and slot ops. Knows nothing of any op."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.ops.dispatch import triton_ops


def _import_triton() -> Any:
    if triton_ops is None:
        return None
    from sglang.srt.speculative.triton_ops import exports

    return exports


# The Triton launchers; None without CUDA or Triton. To be used only where
# `dispatch.use_triton` says so.
triton = _import_triton()
