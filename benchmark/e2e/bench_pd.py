"""Time to the first token and between tokens: one engine beside a pair of engines for
prefill and decode, each on a GPU of its own, or all on the CPU.

    python benchmark/e2e/bench_pd.py --gpus 0,1 --backend tcp nixl
    python benchmark/e2e/bench_pd.py --shape demo --prompt-tokens 300 --running 2

While some requests produce tokens, prompts of --prompt-tokens arrive one after another.
With a pair the same requests go to both engines, as a router sends them. Then one
prompt is handed over again and again, which the prefill engine has and the decode
engine does not: its first token takes the transfer and hardly anything else. Flags
after `--` go to every engine. What is measured is printed at once, as lines of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from model_shapes import SHAPES, write_shape

from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.fleet_gateway import free_port
from sglang.test.server_process import ServerProcess

DEMO = "demo"
LONG_OUTPUT = 400
SHORT_PROMPT = 64
TIMEOUT_SECONDS = 600.0


class Arrangement:
    """Engines that serve one request together.

    Args:
        servers: the last one answers.
        port: where the first one listens for the last, or 0 if there is one engine.
    """

    def __init__(self, servers: Sequence[ServerProcess], port: int = 0) -> None:
        self.urls = [server.wait_ready().url for server in servers]
        self._port = port
        self._rng = random.Random(0)

    def body(self, tokens: int, output: int) -> dict[str, Any]:
        """Return a new request."""
        params = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        ids = [self._rng.randrange(100, 200) for _ in range(tokens)]
        return {"input_ids": ids, "sampling_params": params, "stream": True}

    async def serve(
        self, http: httpx.AsyncClient, body: dict[str, Any]
    ) -> tuple[float, list[float]]:
        """Return the seconds to the first token and those between tokens."""
        if self._port:
            room = self._rng.randrange(1 << 62)
            pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port}
            body = {**body, **pair, "bootstrap_room": room}
        beside = [
            asyncio.create_task(
                http.post(url + "/generate", json={**body, "stream": False})
            )
            for url in self.urls[:-1]
        ]
        times = [time.perf_counter()]
        async with http.stream("POST", self.urls[-1] + "/generate", json=body) as found:
            found.raise_for_status()
            async for line in found.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        for task in beside:
            (await task).raise_for_status()
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        return gaps[0], gaps[1:]

    async def received(self, http: httpx.AsyncClient) -> tuple[int, int]:
        """Return the bytes that came from other engines, and the requests that did not
        get all that they asked for."""
        answer = await http.get(self.urls[-1] + "/server_info")
        stats = answer.json()["internal_states"][0]
        failed: int = stats["num_transfer_failed_reqs_total"]
        return stats["kv_transfer_received_bytes_total"], failed


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False)


async def measure(engines: Arrangement, args: argparse.Namespace) -> dict[str, float]:
    """Return times to the first token of long prompts, and between the tokens of others
    beside them."""
    async with client() as http:
        await engines.serve(http, engines.body(args.prompt_tokens, 2))
        running = [
            asyncio.create_task(
                engines.serve(http, engines.body(SHORT_PROMPT, LONG_OUTPUT))
            )
            for _ in range(args.running)
        ]
        firsts = []
        for _ in range(args.prompts):
            first, _ = await engines.serve(http, engines.body(args.prompt_tokens, 2))
            firsts.append(first)
        gaps = [gap for task in running for gap in (await task)[1]]
    return {
        "ttft_ms": round(statistics.median(firsts) * 1e3, 1),
        "itl_p50_ms": round(statistics.median(gaps) * 1e3, 2),
        "itl_p99_ms": round(statistics.quantiles(gaps, n=100)[98] * 1e3, 2),
    }


async def hand_over(engines: Arrangement, args: argparse.Namespace) -> dict[str, float]:
    """Return the time to the first token of a prompt that only the prefill engine has,
    alone, and the bytes handed over in it."""
    body = engines.body(args.prompt_tokens, 1)
    firsts, sizes = [], []
    async with client() as http:
        await engines.serve(http, body)
        for _ in range(args.prompts):
            flushed = await http.post(engines.urls[-1] + "/flush_cache")
            flushed.raise_for_status()
            before, _ = await engines.received(http)
            first, _ = await engines.serve(http, body)
            after, failed = await engines.received(http)
            firsts.append(first)
            sizes.append(after - before)
    seconds, size = statistics.median(firsts), statistics.median(sizes)
    return {
        "handed_over_ms": round(seconds * 1e3, 1),
        "handed_over_gb": round(size / 1e9, 4),
        "gb_s": round(size / seconds / 1e9, 2),
        "failed": failed,
    }


def start(stack: ExitStack, flags: Sequence[str], gpu: str | None) -> ServerProcess:
    environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    server = ServerProcess(flags, environment=environment, is_forked=False)
    stack.callback(server.stop)
    return server


def show(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def measure_one(
    args: argparse.Namespace, flags: Sequence[str], gpu: str | None
) -> None:
    with ExitStack() as stack:
        began = time.perf_counter()
        engines = Arrangement([start(stack, flags, gpu)])
        ready = round(time.perf_counter() - began, 1)
        show(engines=1, ready_s=ready, **asyncio.run(measure(engines, args)))


def measure_pair(
    args: argparse.Namespace,
    backend: str,
    flags: Sequence[str],
    gpus: Sequence[str | None],
) -> None:
    port = free_port()
    flags = [*flags, "--disaggregation-transfer-backend", backend]
    flags += ["--disaggregation-bootstrap-port", str(port)]
    with ExitStack() as stack:
        began = time.perf_counter()
        servers = [
            start(stack, [*flags, "--disaggregation-mode", mode], gpu)
            for mode, gpu in zip(("prefill", "decode"), gpus, strict=True)
        ]
        engines = Arrangement(servers, port)
        ready = round(time.perf_counter() - began, 1)
        usual = {"engines": 2, "backend": backend}
        show(**usual, ready_s=ready, **asyncio.run(measure(engines, args)))
        show(**usual, **asyncio.run(hand_over(engines, args)))
        for server in servers:
            for line in server.lines:
                if "KV transfer" in line:
                    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[DEMO, *sorted(SHAPES)])
    parser.set_defaults(shape="Llama-3.1-8B")
    parser.add_argument("--gpus", help="two numbers, as in 0,1; unset: the CPU")
    parser.add_argument("--backend", nargs="+", default=["auto"])
    parser.add_argument("--slots", type=int, default=65_536)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--only-pairs", action="store_true", help="no single engine")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    gpus: list[str | None] = args.gpus.split(",") if args.gpus else [None, None]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--skip-tokenizer-init", "--max-total-tokens", str(args.slots)]
        if args.shape == DEMO:
            flags += ["--model-path", str(bundled_demo_model_path())]
        else:
            model = Path(folder, "model")
            write_shape(args.shape, model)
            flags += ["--model-path", str(model), "--load-format", "dummy"]
        flags += args.flags
        if not args.only_pairs:
            measure_one(args, flags, gpus[0])
        for backend in args.backend:
            measure_pair(args, backend, flags, gpus)


if __name__ == "__main__":
    main()
