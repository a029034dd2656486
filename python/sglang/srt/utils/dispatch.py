"""`Op` of `kv_canary.op`, after `SGLANG_NATIVE_KERNELS` was applied to it.

Every op of the engine takes `Op` from here, so that the setting holds before the first
call of any of them. Knows no op.
"""

from __future__ import annotations

from kv_canary.op import Op, switch_off_native
from sglang.srt.environ import envs

__all__ = ["Op"]

if not envs.SGLANG_NATIVE_KERNELS.get():
    switch_off_native("SGLANG_NATIVE_KERNELS=0")
