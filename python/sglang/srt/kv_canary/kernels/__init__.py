"""The launches of the canary that this engine makes.

Their kernels (torch references, Triton, native) are the core's: `kv_canary.kernels`.
"""

from __future__ import annotations

from kv_canary.launches import (
    carry,
    check_drawn,
    finish_accepted,
    finish_step,
    gather_findings,
    note_tokens,
    poison,
    send_tokens,
)

__all__ = [
    "carry",
    "check_drawn",
    "finish_accepted",
    "finish_step",
    "gather_findings",
    "note_tokens",
    "poison",
    "send_tokens",
]
