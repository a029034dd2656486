"""Serves mixed traffic with the installed vLLM and prints the outcome as JSON.

KV_CANARY=raise python traffic.py MODEL --options '{"enforce_eager": true}'
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from mixed import Waves, main, serve_waves

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {
        "mode": 0,
        "custom_ops": ["none"],
        "cudagraph_mode": "FULL_DECODE_ONLY",
    },
    # Kernels of other models are warmed up by packages that are not here.
    "kernel_config": {"enable_jit_warmup": False, "enable_cutedsl_warmup": False},
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "num_gpu_blocks_override": 96,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,
    "seed": 0,
    "disable_log_stats": True,
}


def serve(model: str, waves: Waves, options: dict[str, Any]) -> dict[str, Any]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(**{"model": model, **OPTIONS, **options})
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False
    )

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        given = [{"prompt_token_ids": tokens} for tokens in prompts]
        outputs = engine.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    return {
        "vllm": vllm.__version__,
        "runner": type(runner).__module__,
        **serve_waves(generate, waves),
    }


if __name__ == "__main__":
    main(str(__doc__), serve)
