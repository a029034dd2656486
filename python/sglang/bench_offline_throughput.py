"""`python -m sglang.bench_offline_throughput`: all requests at once through `Engine`.

Total throughput and prefix cache hits, without HTTP.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from kv_canary.command_line import ends_with_its_reader
from sglang.bench_utils.datasets import BenchRequest, DatasetArgs, make_requests
from sglang.bench_utils.launch import flush_when_idle, json_object_flag, run_cli
from sglang.bench_utils.report import (
    Json,
    format_table,
    print_report,
    provenance,
    rate,
)
from sglang.srt.arg_groups.arg_parser import (
    Arg,
    FlagParser,
    add_fields,
    declared_fields,
    from_namespace,
)
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

WARMUP_REQUESTS = 16
WARMUP_OUTPUT_LEN = 16


@dataclass(frozen=True, kw_only=True)
class BenchArgs(DatasetArgs):
    """The flags of this benchmark in addition to the engine's."""

    result_filename: Annotated[
        str | None, Arg("File to append the report's line to.")
    ] = None
    disable_ignore_eos: Annotated[
        bool, Arg("Let requests end before their drawn length.")
    ] = False
    extra_request_body: Annotated[
        str | None, Arg("JSON object with further sampling parameters.")
    ] = None
    skip_warmup: Annotated[
        bool, Arg("Measure from the first request, without a warm-up.")
    ] = False

    def sampling_params(self, output_len: int) -> dict[str, Any]:
        return {
            "temperature": 0.0,
            "max_new_tokens": output_len,
            "ignore_eos": not self.disable_ignore_eos,
            **json_object_flag("--extra-request-body", self.extra_request_body),
        }


def parse_args(argv: Sequence[str] | None = None) -> tuple[ServerArgs, BenchArgs]:
    """Parse both kinds of flags.

    Raises:
        ValueError: a value is invalid; names the flag.
    """
    parser = FlagParser(
        prog="python -m sglang.bench_offline_throughput",
        description="Time many requests at once through the offline engine.",
        preferred=[declared.flag for declared in declared_fields(BenchArgs)],
    )
    add_fields(parser, BenchArgs)
    ServerArgs.add_flags(parser)
    parser.set_defaults(log_level="error")
    namespace = parser.parse_args(argv)
    bench_args = BenchArgs(**from_namespace(BenchArgs, namespace))
    return ServerArgs(**ServerArgs.given(namespace)), bench_args


def run_requests(
    engine: Engine, bench_args: BenchArgs, requests: Sequence[BenchRequest]
) -> Json:
    """Measure one call with all `requests`."""
    params = [bench_args.sampling_params(request.output_len) for request in requests]
    ids = [request.input_ids for request in requests]
    began = time.perf_counter()
    answers = engine.generate(input_ids=ids, sampling_params=params)
    seconds = time.perf_counter() - began
    assert isinstance(answers, list)
    meta: list[Mapping[str, Any]] = [answer["meta_info"] for answer in answers]
    inputs = sum(m["prompt_tokens"] for m in meta)
    outputs = sum(m["completion_tokens"] for m in meta)
    cached = sum(m["cached_tokens"] for m in meta)
    return {
        "successful_requests": len(answers),
        "total_latency": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": cached,
        "cache_hit_rate": rate(cached, inputs),
        "request_throughput": rate(len(answers), seconds),
        "input_throughput": rate(inputs, seconds),
        "output_throughput": rate(outputs, seconds),
        "total_throughput": rate(inputs + outputs, seconds),
    }


def run_benchmark(server_args: ServerArgs, bench_args: BenchArgs) -> Json:
    """Start an engine, warm it up, run the dataset; return the report.

    Raises:
        ValueError: a request does not fit the model, or a flag is wrong.
    """
    assert server_args.tokenizer_path is not None
    tokenizer = load_tokenizer(server_args.tokenizer_path)
    requests = make_requests(bench_args, tokenizer)
    with Engine(server_args=server_args) as engine:
        if not bench_args.skip_warmup:
            # Different prompts, which leave nothing useful in the prefix cache.
            other = dataclasses.replace(bench_args, seed=bench_args.seed + 1)
            warmup = [
                dataclasses.replace(
                    request, output_len=min(request.output_len, WARMUP_OUTPUT_LEN)
                )
                for request in make_requests(other, tokenizer)[:WARMUP_REQUESTS]
            ]
            run_requests(engine, bench_args, warmup)
            flush_when_idle(engine.flush_cache)
        result = run_requests(engine, bench_args, requests)
        state = engine.get_server_info()["internal_states"][0]
    return {
        "benchmark": "offline_throughput",
        "backend": "engine",
        "dataset_name": bench_args.dataset_name,
        "model_path": server_args.model_path,
        "radix_cache": not server_args.disable_radix_cache,
        **result,
        "retracted_requests": state["num_retracted_reqs"],
        **provenance(),
    }


def print_table(report: Json) -> None:
    rows = [(label, report[key]) for key, label in _ROWS.items()]
    print(format_table(("Offline throughput", report["dataset_name"]), rows))


_ROWS = {
    "successful_requests": "Successful requests",
    "total_latency": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "cache_hit_rate": "Cached share of input tokens",
    "retracted_requests": "Retracted requests",
    "request_throughput": "Requests/s",
    "input_throughput": "Input tokens/s",
    "output_throughput": "Output tokens/s",
    "total_throughput": "Total tokens/s",
}


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    def run() -> int:
        server_args, bench_args = parse_args(argv)
        report = run_benchmark(server_args, bench_args)
        print_table(report)
        print_report(report, output_file=bench_args.result_filename)
        return 0

    return run_cli(run)


if __name__ == "__main__":
    sys.exit(main())
