"""Performance of the server over HTTP on this machine, with its default threads.

python benchmark/e2e/server_figures.py [--model-path PATH] [--rounds 5]
Start-up time, time to first token at idle against the bare forward, decode speed of one
request and of 16 at once. Prints a table; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence

from sglang.bench_utils.datasets import BenchRequest
from sglang.bench_utils.http_load import LoadClient, LoadPace, run_load
from sglang.bench_utils.launch import run_report
from sglang.bench_utils.local_server import LocalServer
from sglang.bench_utils.report import (
    Json,
    format_table,
    provenance,
    rate,
    ratio,
)
from sglang.bench_utils.wire import BodyOptions
from sglang.bench_utils.worker import BenchWorker, worker_environment
from sglang.bench_utils.workloads import CONCURRENT, Workload, Workloads
from sglang.srt.environ import child_environment
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

FIRST_TOKEN_LENS = (512, 32)
FIRST_TOKEN_SAMPLES = 4  # per round
FIRST_TOKEN_OUTPUT = 2
PAUSE_SECONDS = 0.05
WARM_UP_ROUND = -1
OPTIONS = BodyOptions(model="", stream=True, ignore_eos=True, send_ids=True)


def to_requests(workload: Workload) -> list[BenchRequest]:
    return [
        BenchRequest(text="", input_ids=prompt, output_len=output_len)
        for prompt, output_len in zip(
            workload.prompts, workload.output_lens, strict=True
        )
    ]


async def measure(
    server: LocalServer, forward: BenchWorker, workloads: Workloads, *, rounds: int
) -> Json:
    """Measure all figures of a running server.

    Raises:
        ValueError: a request failed.
    """
    async with LoadClient(server.url, backend="sglang") as client:
        await _load(client, to_requests(workloads.equal(WARM_UP_ROUND)))
        first = {}
        for length in FIRST_TOKEN_LENS:
            labels = range(rounds * FIRST_TOKEN_SAMPLES)
            prompts = [workloads.prompt(f"{length} {i}", length) for i in labels]
            outputs = [FIRST_TOKEN_OUTPUT] * len(prompts)
            workload = Workload(prompts=prompts, output_lens=outputs)
            first[str(length)] = await _first_token(client, forward, workload)
        single, concurrent = [], []
        for round_ in range(rounds):
            sequential = to_requests(workloads.sequential(round_, count=1))
            single.append(await _load(client, sequential))
            concurrent.append(await _load(client, to_requests(workloads.mixed(round_))))
    return {
        "ready_seconds": server.ready_seconds,
        "first_token": first,
        "b1_tok_s": statistics.median(single),
        "b16_tok_s": statistics.median(concurrent),
    }


async def _load(client: LoadClient, requests: Sequence[BenchRequest]) -> float:
    """Return the output tokens per second of `requests`, all at once."""
    records, seconds = await run_load(
        client, requests, options=OPTIONS, pace=LoadPace()
    )
    errors = [record.error for record in records if record.error is not None]
    if errors:
        raise ValueError(f"{len(errors)} request(s) failed: {errors[0]}")
    return rate(sum(record.output_tokens for record in records), seconds)


async def _first_token(
    client: LoadClient, forward: BenchWorker, workload: Workload
) -> Json:
    """Measure medians in ms, through HTTP and of the bare forward, in turn."""
    through_http, bare = [], []
    requests = to_requests(workload)
    forward.call("prefill", prompt=requests[0].input_ids)
    for request in requests:
        time.sleep(PAUSE_SECONDS)
        record = await client.send(request, OPTIONS)
        if record.ttft is None:
            raise ValueError(f"no first token: {record.error}")
        through_http.append(record.ttft * 1e3)
        time.sleep(PAUSE_SECONDS)
        bare.append(forward.call("prefill", prompt=request.input_ids) * 1e3)
    http_ms, forward_ms = statistics.median(through_http), statistics.median(bare)
    return {
        "http_ms": http_ms,
        "forward_ms": forward_ms,
        "ratio": ratio(http_ms, forward_ms),
        "difference_ms": http_ms - forward_ms,
    }


def run(args: argparse.Namespace) -> Json:
    """Start a server and the bare model, both with the server's default threads."""
    flags = [] if args.model_path is None else ["--model-path", args.model_path]
    server_args = ServerArgs(model_path=args.model_path)
    assert server_args.tokenizer_path is not None
    tokenizer = load_tokenizer(server_args.tokenizer_path)
    workloads = Workloads(tokenizer, seed=args.seed, is_quick=args.quick)
    threads = max(len(os.sched_getaffinity(0)) - 1, 1)
    environment = worker_environment(child_environment(), threads=threads)
    command = [sys.executable, "-m", "sglang.bench_utils.forward_worker"]
    with (
        LocalServer(flags) as server,
        BenchWorker("forward", command, environment=environment) as forward,
    ):
        forward.call("load", model_path=server_args.model_path)
        figures = asyncio.run(measure(server, forward, workloads, rounds=args.rounds))
    return {
        "benchmark": "server_figures",
        "model_path": args.model_path or "demo",
        "threads": threads,
        "rounds": args.rounds,
        "quick": args.quick,
        **figures,
        **provenance(),
    }


def print_table(report: Json) -> None:
    first = [
        (f"{length} tokens", *figures.values())
        for length, figures in report["first_token"].items()
    ]
    columns = ("First token over HTTP (ms)", "http", "forward", "ratio", "more")
    print(format_table(columns, first) + "\n")
    rows = [
        ("Ready after (s)", report["ready_seconds"]),
        ("One request (tok/s)", report["b1_tok_s"]),
        (f"{CONCURRENT} requests at once (tok/s)", report["b16_tok_s"]),
    ]
    print(format_table((f"Server, {report['threads']} thread(s)", ""), rows) + "\n")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags in `argv`, which defaults to this process's arguments.

    Raises:
        ValueError: a value is invalid; names the flag.
    """
    parser = argparse.ArgumentParser(
        prog="server_figures.py", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--model-path", help="unset: the bundled demo model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts' text")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny lengths, no pauses: shows that it works, figures mean nothing",
    )
    parser.add_argument("--output-file", help="the report's line is appended")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds} must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return run_report(parse_args, run, print_table, argv)


if __name__ == "__main__":
    sys.exit(main())
