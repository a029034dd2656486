"""Serves mixed traffic with the installed vLLM and prints the outcome as JSON.

    KV_CANARY=raise python traffic.py MODEL --options '{"enforce_eager": true}'

Prompts share prefixes, are longer than a chunk, and exceed the pool together. The
digest of the greedy tokens must equal a run without the canary, or one of them is
wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import time
from typing import Any

from mixed import canary_counters, wave_of_prompts

_OPTIONS: dict[str, Any] = {
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


def serve(model: str, waves: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return tokens, time and counters of several waves of requests."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(**{"model": model, **_OPTIONS, **options})
    rng = random.Random(0)
    digest, count = hashlib.sha256(), 0
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False
    )
    begin = time.monotonic()
    for _ in range(waves):
        prompts = [{"prompt_token_ids": tokens} for tokens in wave_of_prompts(rng)]
        for output in engine.generate(prompts, params, use_tqdm=False):
            tokens = list(output.outputs[0].token_ids)
            count += len(tokens)
            digest.update(json.dumps(tokens).encode())
    core = engine.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    return {
        "vllm": vllm.__version__,
        "runner": type(runner).__module__,
        "tokens": count,
        "digest": digest.hexdigest()[:16],
        "seconds": round(time.monotonic() - begin, 2),
        "canary": canary_counters(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine")
    args = parser.parse_args()
    print(json.dumps(serve(args.model, args.waves, args.options)), flush=True)


if __name__ == "__main__":
    main()
