"""Streams of a server while long prompts arrive, and many short requests at once.

python benchmark/e2e/bench_arrivals.py                             # GPU, 8B shape
python benchmark/e2e/bench_arrivals.py --model-path MODEL --streams 4 --prompts 3

A server with its defaults and dummy weights, measured by HTTP clients. First --streams
requests stream alone, then as many while a prompt of --prompt-len tokens arrives every
--every seconds, then --burst requests of --burst-len tokens are sent at once. Shown are
the gaps between tokens of the streams, those of their own start included, the time to
first token of the prompts, and of the burst how many ran at once. The last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from model_shapes import SHAPES, write_shape

from sglang.bench_utils.datasets import BenchRequest
from sglang.bench_utils.http_load import LoadClient, LoadPace, run_load
from sglang.bench_utils.launch import run_report
from sglang.bench_utils.local_server import LocalServer
from sglang.bench_utils.metrics import RequestRecord, percentile
from sglang.bench_utils.report import Json, format_table, provenance
from sglang.bench_utils.wire import BodyOptions
from sglang.test.tiny_models import EOS_ID, write_byte_tokenizer

OPTIONS = BodyOptions(model="", stream=True, ignore_eos=True, send_ids=True)
VOCAB = 256  # What the byte tokenizer of a shape knows.
POLL_SECONDS = 0.05


def random_request(rng: random.Random, length: int, new: int) -> BenchRequest:
    ids = [rng.randrange(VOCAB) for _ in range(length)]
    return BenchRequest(text="", input_ids=ids, output_len=new)


def check(records: Sequence[RequestRecord]) -> None:
    """Raise RuntimeError if a request failed."""
    errors = [record.error for record in records if record.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} failed: {errors[0]}")


def gaps(values: Sequence[float]) -> Json:
    return {
        "tokens": len(values),
        **{f"p{p}_ms": 1e3 * percentile(values, p) for p in (50, 99, 99.9)},
        "max_ms": 1e3 * max(values),
    }


async def streams(
    client: LoadClient, args: argparse.Namespace, *, beside: int, seed: int
) -> Json:
    """Return the gaps of streams while `beside` long prompts arrive."""
    rng = random.Random(seed)
    wanted = [
        random_request(rng, args.input_len, args.new_tokens)
        for _ in range(args.streams)
    ]
    prompts = [random_request(rng, args.prompt_len, 1) for _ in range(beside)]
    times = [args.every * (1 + i) for i in range(beside)]
    task = asyncio.create_task(
        run_load(client, wanted, options=OPTIONS, pace=LoadPace())
    )
    served, _ = await run_load(
        client, prompts, options=OPTIONS, pace=LoadPace(times=times)
    )
    ended = task.done()
    records, seconds = await task
    check([*served, *records])
    if beside and ended:
        raise RuntimeError("the streams ended before the prompts; raise --new-tokens")
    first = [r.ttft for r in served if r.ttft is not None]
    return {
        "seconds": seconds,
        **gaps([*chain(*(r.itl for r in records))]),
        "prompt_ttft_ms": 1e3 * percentile(first, 50),
    }


async def load(client: LoadClient) -> Json:
    answer = await client.get_json("/get_loads") or {}
    (found,) = answer["loads"]
    return dict(found)


async def burst(client: LoadClient, args: argparse.Namespace) -> Json:
    """Return the figures of requests sent at once."""
    rng = random.Random(99)
    wanted = [
        random_request(rng, args.burst_len, args.burst_new) for _ in range(args.burst)
    ]
    task = asyncio.create_task(
        run_load(client, wanted, options=OPTIONS, pace=LoadPace())
    )
    most = 0
    while not task.done():
        most = max(most, (await load(client))["num_running_reqs"])
        await asyncio.sleep(POLL_SECONDS)
    records, seconds = await task
    check(records)
    first = [r.ttft for r in records if r.ttft is not None]
    return {
        "requests": args.burst,
        "most_at_once": most,
        "seconds": seconds,
        "output_tok_s": sum(r.output_tokens for r in records) / seconds,
        "ttft_p50_ms": 1e3 * percentile(first, 50),
        "ttft_p99_ms": 1e3 * percentile(first, 99),
    }


async def measure(server: LocalServer, args: argparse.Namespace) -> Json:
    async with LoadClient(server.url, backend="sglang") as client:
        alone = await streams(client, args, beside=0, seed=0)
        beside = await streams(client, args, beside=args.prompts, seed=1)
        limit = (await load(client))["max_running_requests"]
        return {
            "alone": alone,
            "beside_prompts": beside,
            "burst": await burst(client, args) | {"limit": limit},
        }


def byte_model(shape: str, folder: Path) -> Path:
    """Write a shape that ends with the tokenizer's end-of-text token."""
    write_byte_tokenizer(write_shape(shape, folder))
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"eos_token_id": EOS_ID}
    file.write_text(json.dumps(config))
    return folder


def run(args: argparse.Namespace) -> Json:
    flags = ["--model-path", args.model_path] if args.model_path else []
    if not args.model_path:
        folder = byte_model(args.shape, Path(tempfile.mkdtemp()))
        flags = ["--model-path", str(folder), "--load-format", "dummy"]
        flags += ["--context-length", "16384"]
    with LocalServer([*flags, *args.server_flags]) as server:
        figures = asyncio.run(measure(server, args))
    return {
        "benchmark": "bench_arrivals",
        "model": args.model_path or args.shape,
        "ready_s": server.ready_seconds,
        "streams": args.streams,
        "prompt_len": args.prompt_len,
        **figures,
        **provenance(),
    }


def print_table(report: Json) -> None:
    rows = [
        [name, *(f"{report[key][p]:.2f}" for p in ("p50_ms", "p99_ms", "p99.9_ms"))]
        + [f"{report[key]['max_ms']:.1f}"]
        for name, key in (("alone", "alone"), ("beside prompts", "beside_prompts"))
    ]
    columns = ("p50", "p99", "p99.9", "most")
    print(format_table((f"{report['streams']} streams, gaps in ms", *columns), rows))
    print()
    rows = [[name, value] for name, value in report["burst"].items()]
    print(format_table(("burst", ""), rows))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    parser.add_argument("--model-path", help="a checkpoint instead of a dummy shape")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=500)
    parser.add_argument("--new-tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--prompt-len", type=int, default=8000)
    parser.add_argument("--every", type=float, default=1.0, help="seconds")
    parser.add_argument("--burst", type=int, default=1024)
    parser.add_argument("--burst-len", type=int, default=64)
    parser.add_argument("--burst-new", type=int, default=64)
    parser.add_argument("--server-flags", nargs=argparse.REMAINDER, default=[])
    parser.add_argument("--output-file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_report(parse_args, run, print_table))
