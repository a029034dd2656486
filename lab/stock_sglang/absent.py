"""What a stock SGLang imports and a text model never calls."""

from __future__ import annotations

from absent_packages import StandIns

SGLANG = StandIns(
    packages=frozenset(
        {
            "IPython",
            "anthropic",
            "compressed_tensors",
            "datasets",
            "deep_gemm",
            "flashinfer",
            "gguf",
            "llguidance",
            "mistral_common",
            "modelscope",
            "openai",
            "openai_harmony",
            "outlines",
            "sgl_kernel",
            "soundfile",
            "xgrammar",
        }
    ),
    # `sgl_kernel` has norms of its own, which it takes where these cannot be imported.
    without=frozenset({"flashinfer.norm"}),
    switches={
        "deep_gemm": ("SGLANG_ENABLE_JIT_DEEPGEMM", "false"),
        "flashinfer": ("SGLANG_IS_FLASHINFER_AVAILABLE", "false"),
    },
    functions={
        "flashinfer.sampling": {
            "top_k_renorm_probs": "renormed",
            "top_p_renorm_probs": "renormed",
        }
    },
)
