"""CPU time that the canary takes in a stock vLLM under a server's mixed traffic.

.engines-venv/bin/python lab/engines/bench_vllm_mixed.py --model FOLDER

An engine serves greedy requests, eight at a time: prompts of 16 to 400 tokens, half of
them with one of three shared prefixes, and 8 to 96 new tokens; a request begins when
one ends. The figures are CPU times of the worker's thread, inside the canary and
outside of it, so that other work on the machine slows both alike. The last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from typing import Any

from bench_vllm_plugin import in_a_process

VOCABULARY = range(100, 20_000)


def mixed_requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens they get."""
    rng = random.Random(0)

    def words(length: int) -> list[int]:
        return [rng.choice(VOCABULARY) for _ in range(length)]

    prefixes = [words(n) for n in (64, 160, 320)]
    return [
        (
            (rng.choice(prefixes) if rng.random() < 0.5 else [])
            + words(rng.randrange(16, 80)),
            rng.randrange(8, 96),
        )
        for _ in range(count)
    ]


def clock_canary() -> Counter[str]:
    """Wrap what the plugin's wrappers call. Returns seconds by name, from now on."""
    from kv_canary.engines.engine_canary import EngineCanary
    from kv_canary.engines.group_canary import GroupCanary
    from kv_canary.engines.vllm.attachment import Attachment

    spent: Counter[str] = Counter()

    def clock(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent[name] += time.thread_time() - began

        setattr(owner, name, clocked)

    for name in ("begin", "check", "end", "pass_on"):
        clock(Attachment, name)
    clock(EngineCanary, "sampled")
    clock(GroupCanary, "attend")
    return spent


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Child process: serve the requests and return times per forward."""
    spent = clock_canary()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model=args.model,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=args.at_once,
        enable_prefix_caching=True,
        enforce_eager=True,
        seed=0,
    ).llm_engine

    def run(requests: list[tuple[list[int], int]], name: str) -> int:
        left = list(enumerate(requests))[::-1]
        forwards = 0

        def begin() -> None:
            number, (prompt, length) = left.pop()
            params = SamplingParams(
                max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False
            )
            tokens = TokensPrompt(prompt_token_ids=prompt)
            engine.add_request(f"{name}{number}", tokens, params)

        for _ in range(args.at_once):
            begin()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished and left:
                    begin()
            forwards += 1
        return forwards

    run(mixed_requests(args.at_once), "warm")
    spent.clear()
    began = time.process_time()
    forwards = run(mixed_requests(args.requests), "measured")
    total, canary = time.process_time() - began, sum(spent.values())
    return {
        "forwards": forwards,
        "engine_ms": 1e3 * (total - canary) / forwards,
        "canary_ms": 1e3 * canary / forwards,
        "share": canary / (total - canary),
        "parts_ms": {name: 1e3 * s / forwards for name, s in sorted(spent.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--mode", default="raise", choices=["log", "raise"])
    parser.add_argument("--real-data", default="none,partial,rotate,all")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print(json.dumps(serve(args)))
        return
    document: dict[str, Any] = {
        "benchmark": "bench_vllm_mixed",
        "model": os.path.basename(args.model.rstrip("/")),
        "mode": args.mode,
        "requests": args.requests,
        "at_once": args.at_once,
    }
    print("real data  engine, ms  canary, ms  share")
    for real_data in args.real_data.split(","):
        settings = {"KV_CANARY": args.mode, "KV_CANARY_REAL_DATA": real_data}
        found = document[real_data] = in_a_process(settings)
        print(
            f"{real_data:9} {found['engine_ms']:11.1f} {found['canary_ms']:11.2f} "
            f"{found['share']:6.1%}",
            flush=True,
        )
    print(json.dumps(document))


if __name__ == "__main__":
    main()
