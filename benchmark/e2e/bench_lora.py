"""Steps with LoRA adapters on a real model shape with dummy weights.

python benchmark/e2e/bench_lora.py --batch-size 1 32 128 --adapters 8 --rank 16

Decode steps of the whole scheduler: without --enable-lora, with it and no adapter, and
with a batch that mixes the adapters. Prefills of one request: without an adapter, with
one, and with one but without graphs. Then the same requests twice, while others decode:
all adapters have slots, and --rotate adapters take turns in the slots. The difference
is what copies cost. With --tiny a small shape on any device. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, write_shape
from served import build_served, free_memory

from sglang.srt.managers.messages.io_struct import (
    FlushCacheReq,
    GenerateReq,
    LoraRef,
)
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.adapters import write_adapter

WARM_STEPS = 8
# Between two requests of a rotation.
ROTATION_STEPS = 4
TINY = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
TINY |= {"vocab_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1}


class Bench:
    """One engine of the shape."""

    def __init__(self, args: argparse.Namespace, model: Path, **flags: Any) -> None:
        self.args = args
        self.io = ListIO()
        sizes: dict[str, Any] = (
            {"max_total_tokens": 4096, "dtype": "bfloat16"} if args.tiny else {}
        )
        server_args = ServerArgs(
            model_path=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            max_running_requests=max(args.batch_size),
            skip_server_warmup=args.skip_server_warmup,
            **sizes | flags,
        )
        self.scheduler: Scheduler = build_served(server_args, self.io)
        self._rids = itertools.count()

    @property
    def adapters(self) -> list[LoraRef]:
        return list(self.scheduler.ready_message().loras)

    def submit(
        self, lora: LoraRef | None, *, tokens: int, input_len: int | None = None
    ) -> None:
        rid = f"r{next(self._rids)}"
        length = input_len or self.args.input_len
        ids = [(hash(rid) + i) % 256 for i in range(length)]
        params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
        self.io.requests.append(
            GenerateReq(rid=rid, input_ids=ids, sampling_params=params, lora=lora)
        )

    def decode_ms(self, rows: int, loras: list[LoraRef | None]) -> float:
        """Return the median step of `rows` requests that take turns in `loras`."""
        for i in range(rows):
            tokens = self.args.steps + WARM_STEPS + 64 + rows
            self.submit(loras[i % len(loras)], tokens=tokens)
        while self.scheduler.running is None or len(self.scheduler.running) < rows:
            self.scheduler.step()
        times = self.steps(WARM_STEPS + self.args.steps)[WARM_STEPS:]
        self.drain()
        return statistics.median(times) * 1e3

    def steps(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self.scheduler.step()
            times.append(time.perf_counter() - began)
        return times

    def drain(self) -> None:
        self.io.requests.append(FlushCacheReq(call_id=0))
        while self.io.requests or self.scheduler.has_work():
            self.scheduler.step()
        self.io.responses.clear()

    def prefill_ms(self, tokens: int, lora: LoraRef | None) -> float:
        """Return the median time from a prompt's arrival to its first token."""
        times = []
        for _ in range(WARM_STEPS + 16):
            self.submit(lora, tokens=1, input_len=tokens)
            began = time.perf_counter()
            while self.io.requests or self.scheduler.has_work():
                self.scheduler.step()
            times.append(time.perf_counter() - began)
        self.io.responses.clear()
        return statistics.median(times[WARM_STEPS:]) * 1e3

    @contextmanager
    def without_prefill_graphs(self) -> Iterator[None]:
        runner = self.scheduler.worker.model_runner
        graphs, runner.prefill_graph_runner = runner.prefill_graph_runner, None
        yield
        runner.prefill_graph_runner = graphs

    def rotation(self, loras: list[LoraRef]) -> dict[str, float]:
        """Let requests with these adapters arrive one after another, one every few
        steps, while requests of the base model decode."""
        for _ in range(self.args.adapters):
            self.submit(None, tokens=ROTATION_STEPS * len(loras) + 64)
        self.steps(WARM_STEPS)
        placed = self.num_placed
        times = []
        for lora in loras:
            self.submit(lora, tokens=2 * ROTATION_STEPS)
            times += self.steps(ROTATION_STEPS)
        self.drain()
        times.sort()
        return {
            "copies": self.num_placed - placed,
            "median_ms": statistics.median(times) * 1e3,
            "p99_ms": times[int(len(times) * 0.99)] * 1e3,
            "longest_ms": times[-1] * 1e3,
        }

    @property
    def num_placed(self) -> int:
        adapters = self.scheduler.worker.model_runner.adapters
        assert adapters is not None
        return adapters.pool.num_placed


def write_adapters(args: argparse.Namespace, model: Path, folder: Path) -> list[str]:
    """Write --adapters contents, and --rotate adapters that differ in their scale."""
    paths = []
    for i in range(max(args.adapters, args.rotate)):
        place = folder / str(i)
        content = folder / str(i % args.adapters)
        if i < args.adapters:
            write_adapter(place, model, rank=args.rank, seed=i, size=0.02)
        else:
            place.mkdir()
            config = json.loads((content / "adapter_config.json").read_text())
            config["lora_alpha"] += i
            (place / "adapter_config.json").write_text(json.dumps(config))
            weights = "adapter_model.safetensors"
            (place / weights).symlink_to(content / weights)
        paths.append(f"{i}={place}")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rotate", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--prompts", type=int, nargs="*", default=[32, 128, 512, 1024])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--skip-server-warmup", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        model = write_shape(args.shape, Path(made, "model"))
        if args.tiny:
            file = model / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | TINY))
        paths = write_adapters(args, model, Path(made))
        found = run(args, model, paths)
    print(json.dumps(found))


def run(args: argparse.Namespace, model: Path, paths: list[str]) -> dict[str, Any]:
    bench = Bench(args, model)
    plain = {rows: bench.decode_ms(rows, [None]) for rows in args.batch_size}
    del bench
    free_memory()
    bench = Bench(args, model, lora_paths=paths, max_loras_per_batch=args.adapters)
    none: list[LoraRef | None] = [None]
    mixed: list[LoraRef | None] = [*bench.adapters[: args.adapters]]
    rows_found = []
    print(f"{'rows':>5} {'base ms':>9} {'flag ms':>9} {'mixed ms':>9} {'cost':>7}")
    for rows in args.batch_size:
        flag, adapted = (bench.decode_ms(rows, loras) for loras in (none, mixed))
        cost = adapted / plain[rows] - 1
        print(
            f"{rows:>5} {plain[rows]:>9.3f} {flag:>9.3f} {adapted:>9.3f} {cost:>7.1%}"
        )
        rows_found.append(
            {"rows": rows, "base": plain[rows], "flag": flag, "mixed": adapted}
        )
    prefills = prefill_times(args, bench)
    few = list(itertools.islice(itertools.cycle(bench.adapters[: args.adapters]), 64))
    many = bench.adapters[args.adapters :] + bench.adapters[: args.adapters]
    bench.rotation(few[: args.adapters])
    rotations = {
        "slots for all": bench.rotation(few),
        "rotating": bench.rotation(many),
    }
    for name, found in rotations.items():
        print(f"{name}: {found}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "steps": rows_found,
        "prefills": prefills,
        "rotations": rotations,
    }


def prefill_times(args: argparse.Namespace, bench: Bench) -> list[dict[str, float]]:
    found = []
    lora = bench.adapters[0]
    print(f"{'prompt':>7} {'base ms':>9} {'adapter':>9} {'eager':>9}")
    for tokens in args.prompts:
        times = [bench.prefill_ms(tokens, each) for each in (None, lora)]
        with bench.without_prefill_graphs():
            times.append(bench.prefill_ms(tokens, lora))
        print(f"{tokens:>7}", *(f"{ms:>9.3f}" for ms in times))
        names = ("base", "adapter", "eager")
        found.append({"tokens": tokens, **dict(zip(names, times, strict=True))})
    return found


if __name__ == "__main__":
    main()
