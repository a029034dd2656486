"""Cost of the canary inside a stock vLLM on a GPU: a decode step with and without it.

    python lab/engines/bench_vllm_steps.py                # Llama-3.1-8B's shape

Modes and steps are those of `bench_sglang_plugin.py`. All engines must fit the GPU: the
default three take 24 GB each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from turns import run, run_child


def serve(args: argparse.Namespace) -> None:
    """Child process."""
    from vllm import LLM, SamplingParams

    rows = max(args.batches)
    blocks = rows * -(-(args.input_len + args.output_len + 32) // 16)
    options = {
        "model": args.model,
        "load_format": args.load_format,
        "skip_tokenizer_init": True,
        "attention_backend": "TRITON_ATTN",
        "compilation_config": {
            "mode": 0,
            "custom_ops": ["none"],
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": args.batches,
        },
        "kernel_config": {"enable_jit_warmup": False, "enable_cutedsl_warmup": False},
        "max_model_len": args.input_len + args.output_len + 32,
        "max_num_seqs": rows,
        "block_size": 16,
        "num_gpu_blocks_override": blocks + 64,
        "kv_cache_memory_bytes": 1 << 34,
        "gpu_memory_utilization": 0.1,
        "seed": 0,
        "disable_log_stats": True,
    }
    engine = LLM(**{**options, **args.options})

    def generate(prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        outputs = engine.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    run_child(generate, args)


if __name__ == "__main__":
    run(__doc__, serve, modes=["off", "partial", "rotate"], batches=[1, 32])
