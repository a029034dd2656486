"""The attention backend of the forward that runs now.

A plain module global is safe: one process runs one forward at a time, on one thread.
Entering twice is an error, so that a forgotten exit cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    attn_backend: AttentionBackend


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` current; forwards do not nest."""
    global _current
    if _current is not None:
        raise RuntimeError("a forward is already running: forwards do not nest")
    _current = context
    try:
        yield
    finally:
        _current = None


def get_forward_context() -> ForwardContext:
    if _current is None:
        raise RuntimeError("no forward is running: enter forward_context first")
    return _current
