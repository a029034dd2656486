"""The offline engine and its peers on the CPU: same weights, prompts and cores.

python lab/peers/cpu_generate.py [--cores 0,1] [--rounds 5] [--server] ...
Each side is a separate process, pinned to the same cores with the same number of
threads; the sides take turns. Prints tables; the last line is one JSON document with
`ratio_b1` and `ratio_b16`. How the comparison is kept fair: README.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import phases
from comparison import Arena
from sides import Setup

from sglang.bench_utils.launch import run_cli
from sglang.bench_utils.report import Json, print_report, provenance
from sglang.bench_utils.workloads import Workloads
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

DEFAULT_CORES = 2
MIN_ROUNDS = 5


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags in `argv`, which defaults to this process's arguments.

    Raises:
        ValueError: a value is invalid; names the flag.
    """
    parser = argparse.ArgumentParser(
        prog="cpu_generate.py", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--model-path", help="unset: the bundled demo model")
    parser.add_argument("--cores", help="such as 0,1; unset: the first two")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts' text")
    parser.add_argument(
        "--phases",
        nargs="+",
        choices=tuple(phases.PHASES),
        default=list(phases.PHASES),
        help="unset: all of them",
    )
    parser.add_argument(
        "--server", action="store_true", help="also measure through HTTP"
    )
    parser.add_argument(
        "--llama-python",
        help="a Python that has llama_cpp and gguf; unset: this one, if it has them",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny lengths, no pauses: shows that it works, figures mean nothing",
    )
    parser.add_argument("--output-file", help="the report's line is appended")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds} must be at least 1")
    args.cores = parse_cores(args.cores)
    return args


def parse_cores(text: str | None) -> list[int]:
    """Parse core numbers such as `0,1`. Defaults to the first two that this process may
    use.

    Raises:
        ValueError: not such a list, or a core that is not available.
    """
    available = sorted(os.sched_getaffinity(0))
    if text is None:
        return available[:DEFAULT_CORES]
    try:
        cores = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--cores {text} must look like 0,1") from None
    missing = sorted(set(cores) - set(available))
    if missing:
        raise ValueError(
            f"--cores {text}: core {missing[0]} is not available; choose from "
            f"{','.join(map(str, available))}"
        )
    return cores


def run(args: argparse.Namespace) -> Json:
    """Run all phases; return the report."""
    server_args = ServerArgs(model_path=args.model_path)
    assert server_args.model_path is not None
    assert server_args.tokenizer_path is not None
    workloads = Workloads(
        load_tokenizer(server_args.tokenizer_path), seed=args.seed, is_quick=args.quick
    )
    # Children inherit the cores.
    os.sched_setaffinity(0, args.cores)
    report: Json = {
        "benchmark": "cpu_generate",
        "model_path": args.model_path or "demo",
        "cores": len(args.cores),
        "rounds": args.rounds,
        "quick": args.quick,
        "ratio_b1": None,
        "ratio_b16": None,
    }
    with ExitStack() as stack:
        setup = Setup(
            stack=stack,
            arena=Arena(args.cores, is_quick=args.quick),
            workloads=workloads,
            model_path=server_args.model_path,
            threads=len(args.cores),
            rounds=args.rounds,
            llama_python=args.llama_python or sys.executable,
        )
        for name in phases.PHASES:
            if name in args.phases:
                report.update(phases.PHASES[name](setup))
    if args.server:
        report.update(phases.run_server(args.model_path, rounds=args.rounds))
    return {**report, **provenance()}


def main(argv: Sequence[str] | None = None) -> int:
    def run_and_report() -> int:
        args = parse_args(argv)
        print_report(run(args), output_file=args.output_file)
        return 0

    return run_cli(run_and_report)


if __name__ == "__main__":
    sys.exit(main())
