"""`python -m sglang.bench_serving`: load on a running server, measured by its clients.

Time to first token, inter-token latency, end-to-end latency, throughput.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kv_canary.command_line import ends_with_its_reader
from sglang.bench_utils.crash_dumps import read_crash_dump
from sglang.bench_utils.datasets import (
    BenchRequest,
    DatasetArgs,
    make_requests,
)
from sglang.bench_utils.http_load import LoadClient, LoadPace, progress_bar, run_load
from sglang.bench_utils.launch import json_object_flag, run_cli
from sglang.bench_utils.metrics import RequestRecord, summarize
from sglang.bench_utils.report import (
    Json,
    format_table,
    print_report,
    provenance,
)
from sglang.bench_utils.speed_bench import by_category, category_table
from sglang.bench_utils.wire import BACKENDS, BodyOptions
from sglang.srt.arg_groups.arg_parser import (
    Arg,
    FlagParser,
    add_fields,
    from_namespace,
)
from sglang.srt.utils.hf_tokenizer import load_tokenizer

ALL_FAILED = 1
WARMUP_OUTPUT_LEN = 32
SHOWN_ERRORS = 5


@dataclass(frozen=True, kw_only=True)
class BenchArgs(DatasetArgs):
    """The flags of the benchmark."""

    backend: Annotated[
        str,
        Arg(
            "sglang: /generate; sglang-oai: /v1/completions; sglang-oai-chat: "
            "/v1/chat/completions.",
            tuple(BACKENDS),
        ),
    ] = "sglang"
    base_url: Annotated[
        str | None, Arg("Address of the server; unset: from --host and --port.")
    ] = None
    host: Annotated[str, Arg("Host of the server.")] = "127.0.0.1"
    port: Annotated[int, Arg("Port of the server.")] = 30000
    api_key: Annotated[str | None, Arg("Key sent as a bearer token.")] = None
    model: Annotated[
        str | None, Arg("Model name in requests; unset: the server's first.")
    ] = None
    tokenizer: Annotated[
        str | None, Arg("Folder of the tokenizer; unset: the server's.")
    ] = None
    replay: Annotated[
        Path | None,
        Arg(
            "Send the requests of a crash dump (--crash-dump-folder) instead of a "
            "dataset, at their original times."
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        Arg(
            "Mean requests per second (Poisson); inf: all at once; unset: inf, or with "
            "--replay the recorded times."
        ),
    ] = None
    max_concurrency: Annotated[
        int | None, Arg("Maximum requests in flight; unset: no limit.", low=1)
    ] = None
    warmup_requests: Annotated[
        int, Arg("Warm-up requests before the measured ones.", low=0)
    ] = 1
    flush_cache: Annotated[
        bool, Arg("Empty the server's prefix cache before measuring.")
    ] = False
    tokenize_prompt: Annotated[
        bool, Arg("Send token ids instead of text (not sglang-oai-chat).")
    ] = False
    disable_stream: Annotated[
        bool, Arg("Request complete answers instead of streams.")
    ] = False
    disable_ignore_eos: Annotated[
        bool, Arg("Let requests end before their drawn length.")
    ] = False
    return_logprob: Annotated[bool, Arg("Ask for logprobs.")] = False
    extra_request_body: Annotated[
        str | None, Arg("JSON object merged into each request's parameters.")
    ] = None
    output_file: Annotated[str | None, Arg("File to append the report's line to.")] = (
        None
    )
    output_details: Annotated[
        bool, Arg("Also write each request's figures to --output-file.")
    ] = False
    disable_tqdm: Annotated[bool, Arg("No progress bar.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.request_rate is not None and not self.request_rate > 0.0:
            raise ValueError(f"--request-rate {self.request_rate} must be above 0")
        if self.tokenize_prompt and self.backend == "sglang-oai-chat":
            raise ValueError(
                "--tokenize-prompt does not work with --backend sglang-oai-chat: chat "
                "messages are text; remove it"
            )
        if self.replay is not None and self.backend != "sglang":
            raise ValueError(
                f"--replay sends requests to /generate, as they were; remove --backend "
                f"{self.backend}"
            )
        if self.output_details and self.output_file is None:
            raise ValueError("--output-details needs --output-file")

    def url(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port}"


def parse_args(argv: Sequence[str] | None = None) -> BenchArgs:
    """Parse the flags in `argv`, which defaults to this process's arguments.

    Raises:
        ValueError: a value is invalid; names the flag.
    """
    parser = FlagParser(
        prog="python -m sglang.bench_serving",
        description="Load a running server and time its answers.",
    )
    add_fields(parser, BenchArgs)
    return BenchArgs(**from_namespace(BenchArgs, parser.parse_args(argv)))


async def run_benchmark(args: BenchArgs) -> tuple[Json, list[RequestRecord]]:
    """Run the dataset; return the report and each request's record.

    Raises:
        ValueError: there is no server, it rejects the warm-up, or a flag is wrong.
    """
    extra = json_object_flag("--extra-request-body", args.extra_request_body)
    async with LoadClient(
        args.url(), backend=args.backend, api_key=args.api_key
    ) as client:
        model = args.model or await _served_model(client)
        requests, times = await _requests(args, client)
        options = BodyOptions(
            model=model,
            stream=not args.disable_stream,
            ignore_eos=not args.disable_ignore_eos,
            send_ids=args.tokenize_prompt,
            return_logprob=args.return_logprob,
            extra=extra,
        )
        await _warm_up(client, requests[: args.warmup_requests], options)
        if args.flush_cache:
            await client.flush_cache()
        pace = LoadPace(
            request_rate=args.request_rate or float("inf"),
            times=times,
            max_concurrency=args.max_concurrency,
            seed=args.seed,
        )
        with progress_bar(len(requests), is_hidden=args.disable_tqdm) as advance:
            records, duration = await run_load(
                client,
                requests,
                options=options,
                pace=pace,
                on_done=lambda record: advance(),
            )
        server = await client.get_json("/get_server_info") or {}
    state = (server.get("internal_states") or [{}])[0]
    is_unbounded = args.request_rate in (None, float("inf"))
    rate = "recorded" if times is not None else "inf"
    return {
        "benchmark": "serving",
        "backend": args.backend,
        "dataset_name": "crash-dump" if args.replay else args.dataset_name,
        "model": model,
        "request_rate": rate if is_unbounded else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        **summarize(records, duration=duration),
        "accept_length": state.get("spec_accept_length") or None,
        "by_category": by_category([r.category for r in requests], records),
        "server_version": server.get("version"),
        **provenance(),
    }, records


async def _requests(
    args: BenchArgs, client: LoadClient
) -> tuple[list[BenchRequest], list[float] | None]:
    """Return the requests and their arrival times in seconds, or None to use the
    rate.
    """
    if args.replay is None:
        tokenizer = load_tokenizer(args.tokenizer or await _tokenizer_path(client))
        return make_requests(args, tokenizer), None
    dumped = read_crash_dump(args.replay)
    if dumped.skipped:
        print(
            f"{dumped.skipped} request(s) had embeddings in place of a prompt, which a "
            "dump does not hold; they are left out",
            file=sys.stderr,
        )
    if not dumped.requests:
        raise ValueError(f"--replay {args.replay} holds no request to send")
    return dumped.requests, dumped.arrivals if args.request_rate is None else None


async def _warm_up(
    client: LoadClient, requests: Sequence[BenchRequest], options: BodyOptions
) -> None:
    for request in requests:
        output_len = min(request.output_len, WARMUP_OUTPUT_LEN)
        short = dataclasses.replace(request, output_len=output_len)
        record = await client.send(short, options)
        if record.error is not None:
            raise ValueError(f"the server refuses a warm-up request: {record.error}")


async def _served_model(client: LoadClient) -> str:
    models = await client.get_json("/v1/models")
    if not models or not models.get("data"):
        raise ValueError("the server lists no model at /v1/models; set --model")
    return str(models["data"][0]["id"])


async def _tokenizer_path(client: LoadClient) -> str:
    info = await client.get_json("/get_model_info") or {}
    path = info.get("tokenizer_path") or info.get("model_path")
    if path is None:
        raise ValueError("the server does not name its tokenizer; set --tokenizer")
    return str(path)


def details(records: Sequence[RequestRecord]) -> Json:
    """Return each request's figures, as columns."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "latencies": [r.latency for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.itl for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


def print_table(report: Json) -> None:
    rows = [(label, report[key]) for key, label in _ROWS.items()]
    print(format_table(("Serving", report["backend"]), rows))
    print()
    columns = ("mean", "median", "p90", "p99", "max")
    print(
        format_table(
            ("Latency (ms)", *columns),
            [
                (label, *(report[f"{column}_{key}_ms"] for column in columns))
                for key, label in _LATENCIES.items()
            ],
        )
    )
    if report["by_category"]:
        print()
        print(category_table(report["by_category"]))


def print_errors(records: Sequence[RequestRecord]) -> None:
    """Print the most frequent errors to stderr."""
    errors = Counter(r.error for r in records if r.error is not None)
    for message, count in errors.most_common(SHOWN_ERRORS):
        print(f"{count} request(s) failed: {message}", file=sys.stderr)


_ROWS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests/s",
    "input_throughput": "Input tokens/s",
    "output_throughput": "Output tokens/s",
    "total_throughput": "Total tokens/s",
    "concurrency": "Mean requests in flight",
    "cache_hit_rate": "Cached share of input tokens",
}
_LATENCIES = {
    "e2e_latency": "End to end",
    "ttft": "Time to first token",
    "tpot": "Per output token after it",
    "itl": "Between tokens",
}


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    def run() -> int:
        args = parse_args(argv)
        report, records = asyncio.run(run_benchmark(args))
        print_table(report)
        print_errors(records)
        full = {**report, **details(records)} if args.output_details else report
        print_report(full, output_file=args.output_file, compact=report)
        return 0 if report["completed"] else ALL_FAILED

    return run_cli(run)


if __name__ == "__main__":
    sys.exit(main())
