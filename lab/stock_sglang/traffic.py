"""Serves mixed traffic with the installed SGLang and prints the outcome as JSON.

    KV_CANARY=raise python traffic.py MODEL --options '{"disable_cuda_graph": true}'

Prompts share prefixes, are longer than a chunk, and exceed the pool together. The
digest of the greedy tokens must equal a run without the canary, or one of them is
wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import random
import time
from typing import Any

from mixed import canary_counters, wave_of_prompts

_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": 3072,
    "max_running_requests": 16,
    "context_length": 1024,
    "chunked_prefill_size": 128,
    "log_level": "warning",
}


def serve(model: str, waves: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return tokens, time and counters of several waves of requests."""
    engine = importlib.import_module("sglang").Engine(
        **{"model_path": model, **_OPTIONS, **options}
    )
    rng = random.Random(0)
    digest, count, steps = hashlib.sha256(), 0, 0
    try:
        begin = time.monotonic()
        for _ in range(waves):
            params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
            outputs = engine.generate(
                input_ids=wave_of_prompts(rng), sampling_params=params
            )
            for output in outputs:
                tokens = output["output_ids"]
                count += len(tokens)
                steps += output["meta_info"].get("spec_verify_ct", 0)
                digest.update(json.dumps(tokens).encode())
        return {
            "tokens": count,
            "digest": digest.hexdigest()[:16],
            "seconds": round(time.monotonic() - begin, 2),
            "verifications": steps,
            "canary": canary_counters(),
        }
    finally:
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine")
    args = parser.parse_args()
    print(json.dumps(serve(args.model, args.waves, args.options)), flush=True)


if __name__ == "__main__":
    main()
