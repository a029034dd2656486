"""--attention-backend fa3 is a known name that this version does not serve."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from sglang.srt.configs.attention_backends import check_available
from sglang.srt.layers.attention.attention_registry import create_attention_backend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

MISSING = ["not installed", "pip install sgl-kernel", "flashinfer or triton"]
UNVERIFIED = ["is installed", "not been verified", "flashinfer or triton"]


def create(name: str) -> None:
    rows = ReqToTokenPool(size=2, row_width=8, device="cpu", context_len=8)
    pool = MHATokenToKVPool(
        size=8,
        page_size=1,
        dtype=torch.bfloat16,
        layer_num=1,
        head_num=1,
        head_dim=64,
        device="cpu",
    )
    create_attention_backend(name, req_to_token_pool=rows, kv_pool=pool)


@pytest.mark.parametrize("refuse", [check_available, create])
@pytest.mark.parametrize("is_installed", [False, True])
def test_the_error_says_what_to_do(monkeypatch, refuse, is_installed):
    module = None
    if is_installed:
        module = ModuleType("sgl_kernel")
        module.__spec__ = ModuleSpec("sgl_kernel", None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)
    with pytest.raises(ValueError, match="--attention-backend fa3") as error:
        refuse("fa3")
    for words in UNVERIFIED if is_installed else MISSING:
        assert words in str(error.value)


def test_the_others_are_available():
    for name in ("torch_native", "cpu_native", "triton", "flashinfer"):
        check_available(name)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
