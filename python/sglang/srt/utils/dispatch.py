"""`Op` from `kv_canary.op`, with `SGLANG_NATIVE_KERNELS` applied.

All ops of the engine import `Op` from here, so the setting applies before the first
call of any of them. Knows no ops.
"""

from __future__ import annotations

from kv_canary.op import Op, switch_off_native
from sglang.srt.environ import envs

__all__ = ["Op"]

if not envs.SGLANG_NATIVE_KERNELS.get():
    switch_off_native("SGLANG_NATIVE_KERNELS=0")
