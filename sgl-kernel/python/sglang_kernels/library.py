"""Finds and loads the shared library that registers the ops with torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARY_NAME = "libsglang_kernels.so"


def builtin(name: str) -> Callable[..., Any]:
    """Return the builtin of an op. Calling it directly saves a Python frame per call.

    Raises:
        ImportError: as in `load_library`.
    """
    load_library()
    op: Callable[..., Any] = getattr(torch.ops.sglang_kernels, name).default._op
    return op


@cache
def load_library() -> None:
    """Register the ops of the library under `torch.ops.sglang_kernels`.

    Raises:
        ImportError: the package was installed without its library (no compiler), or
            this torch cannot load it.
    """
    path = Path(__file__).with_name(LIBRARY_NAME)
    if not path.exists():
        raise ImportError(
            f"sglang_kernels was installed without {LIBRARY_NAME}: no working C++ "
            "compiler was found when it was built"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"{path} does not load with torch {torch.__version__}: {error}"
        ) from error
