"""Serves prompts, empties the prefix cache of the GPU, and serves them again with the
KV that a connector kept. Prints whether the answers equal those that the prefix cache
gave, whether those equal what was computed whole, and what was compared.

    KV_CANARY=raise python loads.py MODEL      # vLLM's own offloading to host memory
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
from typing import Any

from traffic import OPTIONS

from kv_canary.engines.vllm.attachment import get_attachment

_CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--connector", type=json.loads, default=_CONNECTOR)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine")
    parser.add_argument("--prompts", type=int, default=12)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    vllm = importlib.import_module("vllm")
    options: dict[str, Any] = {"model": args.model, **OPTIONS, **args.options}
    engine = vllm.LLM(kv_transfer_config=args.connector, **options)
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False
    )
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, 500) for _ in range(rng.randrange(64, 400))]
        for _ in range(args.prompts)
    ]

    def generate() -> list[list[int]]:
        given = [{"prompt_token_ids": tokens} for tokens in prompts]
        outputs = engine.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    first = generate()
    on_gpu = generate()  # stores what is left, and finds it on the GPU
    engine.reset_prefix_cache()
    loaded = generate()
    report: dict[str, Any] = {
        "equal": loaded == on_gpu,
        "equal_without_prefix": on_gpu == first,
    }
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker
    attachment = get_attachment(getattr(worker, "worker", worker).model_runner)
    if attachment is not None:
        canary = attachment.canary
        units = canary.units
        report |= {
            "blocks_compared": units.compared if units else None,
            "blocks_damaged": units.damaged if units else None,
            "violations": dict(canary.reporter.counts),
            "summary": canary.summary(),
        }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
