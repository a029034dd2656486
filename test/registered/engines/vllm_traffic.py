"""Mixed traffic through a stock vLLM in this process: `vllm_traffic.py MODEL REQUESTS`.

Shared prefixes, prompts of whole blocks that are cached whole, prompts longer than a
chunk, too few blocks for all, so that some are preempted. Prints a line of JSON:
outputs' digest, seconds, and, under `KV_CANARY`, the canary's counts. Further arguments
are JSON options of `LLM`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from kv_canary.engines.settings import Mode, read_settings
from kv_canary.faults.vllm.host import BLOCK, VllmHost, random_tokens, write_model
from kv_canary.records import Counter

AT_ONCE = 16


def main() -> None:
    kind, count = sys.argv[1], int(sys.argv[2])
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    rng = random.Random(0)
    prefixes = [random_tokens(rng, n) for n in (70, 40, 130, 260)]
    whole = random_tokens(rng, 2 * BLOCK)
    with tempfile.TemporaryDirectory() as folder:
        host = VllmHost(write_model(Path(folder), kind), **options)
        began, cpu = time.monotonic(), time.process_time()
        for number in range(count):
            prompt = rng.choice(prefixes) + random_tokens(rng, rng.randrange(1, 90))
            if number % 6 == 5:
                prompt = whole
            host.add(prompt, new_tokens=rng.randrange(1, 80))
            if number % AT_ONCE == AT_ONCE - 1:
                for _ in range(30):
                    host.step()
        host.drain(limit=100_000)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        outputs = [host.outputs[str(n)] for n in range(count)]
        report: dict[str, object] = {
            **host.about(),
            "what": kind,
            "outputs": hashlib.sha256(json.dumps(outputs).encode()).hexdigest(),
            "tokens": sum(map(len, outputs)),
            "seconds": round(seconds, 2),
            "cpu_seconds": round(cpu, 2),
        }
        if read_settings().mode is not Mode.OFF:
            canary = host.canary
            counters = canary.counters()
            report |= {
                "forwards": canary.forwards,
                "verified": counters[Counter.VERIFIED_SLOTS],
                "recorded": counters[Counter.TAIL_SLOTS],
                "violations": canary.reporter.total,
                "preempted": host.preemptions,
            }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
