"""Serves mixed traffic with the installed SGLang and prints the outcome as JSON.

KV_CANARY=raise python traffic.py MODEL --options '{"disable_cuda_graph": true}'
"""

from __future__ import annotations

import importlib
from typing import Any

from mixed import Waves, main, serve_waves

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


def serve(model: str, waves: Waves, options: dict[str, Any]) -> dict[str, Any]:
    engine = importlib.import_module("sglang").Engine(
        **{"model_path": model, **_OPTIONS, **options}
    )
    verifications = 0

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        nonlocal verifications
        params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        verifications += sum(o["meta_info"].get("spec_verify_ct", 0) for o in outputs)
        return [output["output_ids"] for output in outputs]

    try:
        outcome = serve_waves(generate, waves)
        return {**outcome, "verifications": verifications}
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(str(__doc__), serve)
