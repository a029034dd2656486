"""Runs a program in a stock vLLM that has no compiled prefill of latents.

KV_CANARY=log python latents.py PATH_OF_KV_CANARY/engines/cli.py selftest --model latent

vLLM's prefill of latents in torch, which it has for CPUs, takes the place of
FlashAttention's, by vLLM's own register of such backends.
"""

from __future__ import annotations

import importlib
import runpy
import sys


def prefill_in_torch() -> None:
    """Must be called before a model is loaded."""
    registry = importlib.import_module(
        "vllm.v1.attention.backends.mla.prefill.registry"
    )
    backends = registry.MLAPrefillBackendEnum
    registry.register_mla_prefill_backend(backends.FLASH_ATTN, backends.CPU.value)


if __name__ == "__main__":
    prefill_in_torch()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
