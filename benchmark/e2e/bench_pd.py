"""Time to the first token and between tokens: one engine beside a pair of engines for
prefill and decode, each on a GPU of its own, or all on the CPU.

    python benchmark/e2e/bench_pd.py --gpus 0,1 --backend nixl -- \\
        --model-path MODEL --load-format dummy

Flags after `--` go to every engine. While some requests produce tokens, prompts of
`--prompt-tokens` arrive one after another. With a pair the same requests go to both
engines, as a router sends them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import httpx

from sglang.test.fleet_gateway import free_port
from sglang.test.server_process import ServerProcess

LONG_OUTPUT = 400
TIMEOUT_SECONDS = 600.0


def start(stack: ExitStack, flags: Sequence[str], gpu: str | None) -> ServerProcess:
    environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    server = ServerProcess(flags, environment=environment, is_forked=False)
    stack.callback(server.stop)
    return server


async def first_and_gaps(
    http: httpx.AsyncClient, urls: Sequence[str], body: dict[str, Any]
) -> tuple[float, list[float]]:
    """Send a request to all `urls`, the last of which answers; return the seconds to
    its first token and those between its tokens."""
    beside = [
        asyncio.create_task(
            http.post(url + "/generate", json={**body, "stream": False})
        )
        for url in urls[:-1]
    ]
    times = [time.perf_counter()]
    async with http.stream("POST", urls[-1] + "/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    for task in beside:
        (await task).raise_for_status()
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    return gaps[0], gaps[1:]


async def measure(
    urls: Sequence[str], args: argparse.Namespace, pair: dict[str, Any]
) -> dict[str, float]:
    rng = random.Random(0)

    def body(tokens: int, output: int) -> dict[str, Any]:
        room = {"bootstrap_room": rng.randrange(1 << 62)} if pair else {}
        ids = [rng.randrange(100, 200) for _ in range(tokens)]
        params = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        asked = {"input_ids": ids, "sampling_params": params, "stream": True}
        return {**asked, **pair, **room}

    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False) as http:
        await first_and_gaps(http, urls, body(args.prompt_tokens, 2))
        running = [
            asyncio.create_task(first_and_gaps(http, urls, body(64, LONG_OUTPUT)))
            for _ in range(args.running)
        ]
        firsts = []
        for _ in range(args.prompts):
            first, _ = await first_and_gaps(http, urls, body(args.prompt_tokens, 2))
            firsts.append(first)
        gaps = [gap for task in running for gap in (await task)[1]]
    return {
        "ttft_ms": round(statistics.median(firsts) * 1e3, 1),
        "itl_p50_ms": round(statistics.median(gaps) * 1e3, 2),
        "itl_p99_ms": round(statistics.quantiles(gaps, n=100)[98] * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", help="two numbers, as in 0,1; unset: the CPU")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    first, second = args.gpus.split(",") if args.gpus else (None, None)
    flags = ["--skip-tokenizer-init", *args.flags]
    with ExitStack() as stack:
        url = start(stack, flags, first).wait_ready().url
        print(json.dumps({"engines": 1, **asyncio.run(measure([url], args, {}))}))
    port = free_port()
    flags += ["--disaggregation-transfer-backend", args.backend]
    flags += ["--disaggregation-bootstrap-port", str(port)]
    with ExitStack() as stack:
        servers = [
            start(stack, [*flags, "--disaggregation-mode", mode], gpu)
            for mode, gpu in (("prefill", first), ("decode", second))
        ]
        urls = [server.wait_ready().url for server in servers]
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
        began = time.perf_counter()
        row = asyncio.run(measure(urls, args, pair))
        seconds = time.perf_counter() - began
        info = httpx.get(urls[1] + "/server_info", trust_env=False).json()
        stats = info["internal_states"][0]
        gigabytes = stats["kv_transfer_received_bytes_total"] / 1e9
        print(
            json.dumps(
                {
                    "engines": 2,
                    "backend": args.backend,
                    **row,
                    "received_gb": round(gigabytes, 3),
                    "seconds": round(seconds, 1),
                    "failed": stats["num_transfer_failed_reqs_total"],
                }
            )
        )


if __name__ == "__main__":
    main()
