"""The launches of the canary that this engine makes.

Their kernels (torch references, Triton, native) are the core's: `kv_canary.kernels`.
"""

from __future__ import annotations

from kv_canary.launches import (
    before_model,
    check_carried,
    expect_rows,
    finish_accepted,
    finish_step,
    gather_findings,
    move_records,
    note_carried,
    note_tokens,
    poison,
    send_tokens,
    write_tail,
)

__all__ = [
    "before_model",
    "check_carried",
    "expect_rows",
    "finish_accepted",
    "finish_step",
    "gather_findings",
    "move_records",
    "note_carried",
    "note_tokens",
    "poison",
    "send_tokens",
    "write_tail",
]
