"""Engines that take turns on one GPU, each in its own process, to compare their steps.

They start together and are measured one after another, in a different order each round;
waiting engines leave the GPU idle. A child prints `READY`, and then one round, as
`one_round` makes it, for each line of standard input.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
CHECKED = "the first forward is checked"
"""Pattern in the log of an engine with a canary."""
READY = {"ready": True}


Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Generates a number of tokens for prompts."""


def run_child(generate: Generate, args: argparse.Namespace) -> None:
    """Run a round for each line of standard input."""
    for batch in args.batches:
        # Compiles, and fills the prefix cache.
        seconds(generate, args, batch, 8)
    print(json.dumps(READY), flush=True)
    for _ in sys.stdin:
        print(json.dumps(one_round(generate, args)), flush=True)


def one_round(generate: Generate, args: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds per decode step at each batch size, and a digest of the
    answers.
    """
    digest, steps = hashlib.sha256(), {}
    short = args.output_len // 8
    for batch in args.batches:
        less, _ = seconds(generate, args, batch, short)
        more, answers = seconds(generate, args, batch, args.output_len)
        digest.update(json.dumps(answers).encode())
        steps[batch] = 1e3 * (more - less) / (args.output_len - short)
    return {"ms": steps, "answers": digest.hexdigest()[:16]}


def seconds(
    generate: Generate, args: argparse.Namespace, batch: int, length: int
) -> tuple[float, list[list[int]]]:
    """Return the seconds of a generation, and its tokens."""
    prompts = [
        [(7 * row + 13 * i) % 500 + 10 for i in range(args.input_len)]
        for row in range(batch)
    ]
    began = time.perf_counter()
    answers = generate(prompts, length)
    return time.perf_counter() - began, answers


class Served:
    """An engine in a separate process."""

    def __init__(self, mode: str, command: Sequence[str], log: Path) -> None:
        """Args: mode: `off`, or a `KV_CANARY_REAL_DATA` under `raise`, which a
        `KV_CANARY_SAMPLE` may follow: `partial@0.02`."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("KV_CANARY")}
        if mode != "off":
            real_data, _, sample = mode.partition("@")
            env |= {"KV_CANARY": "raise", "KV_CANARY_REAL_DATA": real_data}
            if sample:
                env["KV_CANARY_SAMPLE"] = sample
        self.mode = mode
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=0.1 if raised[0] else 20)
        except subprocess.TimeoutExpired:
            self._process.terminate()

    def answer(self, key: str) -> dict[str, Any]:
        """Return the next document it prints with `key`.

        Raises:
            SystemExit: the process ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f'{{"{key}"'):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(
            f"{self.mode}: {self._log.read_text(errors='replace')[-3000:]}"
        )

    def round(self) -> dict[str, Any]:
        """Measure one round now."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer("ms")

    def must_check(self) -> None:
        """Raises: SystemExit: it should check its forwards, and does not."""
        log = self._log.read_text(errors="replace")
        if self.mode != "off" and CHECKED not in log:
            raise SystemExit(f"{self.mode}: nothing was checked:\n{log[-2000:]}")


def measured(
    engines: Sequence[Served], rounds: int, budget: float
) -> dict[str, list[dict[str, Any]]]:
    """Return rounds of each engine, stopping early if another round would not end
    before `budget`, a time of `time.monotonic()`.
    """
    found: dict[str, list[dict[str, Any]]] = {engine.mode: [] for engine in engines}
    for engine in engines:
        engine.answer("ready")
        engine.must_check()
    for number in range(rounds):
        began = time.monotonic()
        turn = number % len(engines)
        for engine in (*engines[turn:], *engines[:turn]):
            found[engine.mode].append(engine.round())
            print(f"{engine.mode:12} {found[engine.mode][-1]}", flush=True)
        now = time.monotonic()
        if 2 * now - began > budget:
            break
    return found


def summary(
    benchmark: str, found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the summary document."""
    medians = {
        mode: {
            batch: round(statistics.median(one["ms"][batch] for one in rounds), 3)
            for batch in rounds[0]["ms"]
        }
        for mode, rounds in found.items()
    }
    answers = {one["answers"] for rounds in found.values() for one in rounds}
    return {
        "benchmark": benchmark,
        "rounds": len(next(iter(found.values()))),
        "answers_equal": len(answers) == 1,
        "decode_ms": medians,
    }


def run(
    description: str,
    serve: Callable[[argparse.Namespace], None],
    *,
    modes: Sequence[str],
    batches: Sequence[int],
) -> None:
    """Run a benchmark of this process's arguments, or one of its children."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a model")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--modes", nargs="+", default=modes)
    parser.add_argument("--batches", type=int, nargs="+", default=batches)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--seconds", type=float, default=600, help="no round is begun that ends later"
    )
    parser.add_argument("--port", type=int, default=30100, help="of the first engine")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if args.model is None:
            Path(folder, "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        engines = []
        for number, mode in enumerate(args.modes):
            command = [sys.executable, *sys.argv, "--serve"]
            command += ["--model", args.model or folder]
            command += ["--port", str(args.port + 200 * number)]
            log = Path(folder, f"{mode}.log")
            engines.append(stack.enter_context(Served(mode, command, log)))
        found = measured(engines, args.rounds, begin + args.seconds)
        benchmark = Path(sys.argv[0]).stem
        print(json.dumps(summary(benchmark, found)), flush=True)
