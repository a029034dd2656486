"""What a stock vLLM imports and a text model never calls."""

from __future__ import annotations

import os

from absent_packages import StandIns

VLLM = StandIns(
    packages=frozenset(
        {
            "llguidance",
            "openai_harmony",
            "uvloop",
            *os.environ.get("ABSENT_PACKAGES", "").split(),
        }
    ),
    # Else its sampler imports it without a question.
    switches={"flashinfer": ("VLLM_USE_FLASHINFER_SAMPLER", "0")},
    # Rewrites graphs that are compiled, which they are not.
    modules=frozenset({"vllm.compilation.passes.pass_manager"}),
)
