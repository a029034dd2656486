"""Cost of the canary inside a stock SGLang: a decode step with and without it.

    python lab/engines/bench_sglang_plugin.py             # Llama-3.1-8B's shape
    python lab/engines/bench_sglang_plugin.py --model FOLDER --load-format auto

There is one engine per mode, in turns: without `KV_CANARY`, and with `raise` for each
named `KV_CANARY_REAL_DATA`. All must fit the GPU: the default three take 25 GB each.

A step is the difference of a long and a short generation of the same requests, divided
by the steps in which they differ, so that prefills cancel out; a mode's figure is the
median of the rounds. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from turns import run, run_child


def serve(args: argparse.Namespace) -> None:
    """Child process."""
    from sglang import Engine

    rows = max(args.batches)
    options = {
        "model_path": args.model,
        "load_format": args.load_format,
        "port": args.port,
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_bs_decode": args.batches,
        "disable_prefill_cuda_graph": True,
        "max_running_requests": rows,
        "max_total_tokens": rows * (args.input_len + 2 * args.output_len + 16),
        "mem_fraction_static": 0.9,
        "log_level": "warning",
    }
    engine = Engine(**{**options, **args.options})

    def generate(prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        params = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        return [output["output_ids"] for output in outputs]

    try:
        run_child(generate, args)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    run(__doc__, serve, modes=["off", "partial", "all"], batches=[1, 32])
