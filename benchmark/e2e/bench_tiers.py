"""KV that moves between device, host memory and files: bandwidth, hits, disturbance.

python benchmark/e2e/bench_tiers.py                                # GPU, 8B shape
python benchmark/e2e/bench_tiers.py --device cpu --shape tiny      # any machine

One scheduler in this process, with dummy weights. First copies of pinned memory alone,
which is the floor. Then units of one prompt are stored and loaded, with their
comparison; a prompt of --input-len tokens is served computed, from host memory, from
files, and from the device; and --rows requests decode while units are stored at full
speed. Medians of --repeats. Last, --users talk in turns with three times as much KV as
the device holds, with host memory and without. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, write_shape
from served import free_memory

from sglang.bench_utils.launch import run_report
from sglang.bench_utils.report import Json, format_table, provenance
from sglang.srt.kv_tiers.host_pool import HostPool
from sglang.srt.kv_tiers.tiers import KVTiers
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_tiny_model

COPIED_BYTES = 1 << 30
NEW_TOKENS = 1


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median seconds of `work`, after one run that is not counted."""
    seconds = []
    for number in range(repeats + 1):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        if number:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def copy_bandwidth(device: str, repeats: int) -> Json:
    """Return GB/s of copies between pinned memory and the device."""
    host = HostPool(size=1, bytes_per_unit=COPIED_BYTES, is_pinned=device == "cuda")
    there = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)

    def to_device() -> None:
        there.copy_(host.memory[0], non_blocking=True)

    def to_host() -> None:
        host.memory[0].copy_(there, non_blocking=True)

    return {
        "to_host": COPIED_BYTES / timed(to_host, device, repeats) / 1e9,
        "to_device": COPIED_BYTES / timed(to_device, device, repeats) / 1e9,
    }


class Engine:
    """The scheduler, and its tiers."""

    def __init__(self, args: argparse.Namespace, model: Path, folder: Path) -> None:
        self.args = args
        extra = {"dir": str(folder / "kv"), "max_gb": 64}
        self.harness = EngineHarness(
            model,
            load_format="auto" if args.shape == "tiny" else "dummy",
            device=args.device,
            skip_tokenizer_init=True,
            max_total_tokens=args.slots,
            chunked_prefill_size=8192,
            context_length=args.context_length,
            kv_canary=args.kv_canary,
            enable_hierarchical_cache=True,
            hicache_ratio=args.ratio,
            hicache_storage_backend="file",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra),
            # Real starts rehearse; the harness leaves it out.
            skip_server_warmup=args.device == "cpu",
        )
        assert self.harness.scheduler.tiers is not None
        self.tiers: KVTiers = self.harness.scheduler.tiers.tiers
        generator = torch.Generator().manual_seed(1)
        vocab = self.harness.scheduler.model_config.vocab_size
        shape = (args.input_len,)
        self.prompt = torch.randint(0, vocab, shape, generator=generator).tolist()

    def serve(self) -> float:
        """Return the seconds until the prompt's first token."""
        self.harness.submit(self.prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        begin = time.perf_counter()
        self.harness.run()
        return time.perf_counter() - begin

    def flush(self, *, host: bool = False, files: bool = False) -> None:
        self.tiers.mover.wait_for_stores()
        assert self.tiers.storage is not None
        self.tiers.storage.wait_for_writes()
        self.harness.scheduler.cache.reset()
        self.tiers.flush(host=host, storage=files)

    def serves(self, **flushed: bool) -> float:
        """Return the median seconds to the first token, with these tiers emptied before
        each."""
        found = []
        for _ in range(self.args.repeats + 1):
            self.flush(**flushed)
            found.append(self.serve())
        return statistics.median(found[1:])


def moves(engine: Engine) -> Json:
    """Return GB/s of storing and loading the units of the prompt, and the share of a
    load that is not copying."""
    args, tiers = engine.args, engine.tiers
    group, pool = tiers.groups[0], tiers.pools[0]
    count = min(args.input_len // tiers.unit, pool.size)
    slots = torch.arange(count * tiers.unit) + tiers.cache.page_size
    targets = [pool.memory[place] for place in range(count)]
    size = count * group.layout.bytes_per_unit

    def store() -> None:
        tiers.mover.store(group, slots, targets)
        tiers.mover.wait_for_stores()

    stored = timed(store, args.device, args.repeats)
    shipment = tiers.shipment_of(0, slots, targets)

    def load() -> None:
        tiers.mover.load([shipment]).wait()

    loaded = timed(load, args.device, args.repeats)
    return {
        "bytes": size,
        "unit_bytes": group.layout.bytes_per_unit,
        "store_gb_s": size / stored / 1e9,
        "load_gb_s": size / loaded / 1e9,
    }


def hits(engine: Engine) -> Json:
    """Return seconds to the first token of the prompt by where its KV is."""
    computed = engine.serves(host=True, files=True)
    engine.serve()
    host = engine.serves()
    assert engine.tiers.stats.damaged == 0
    engine.flush()
    files = engine.serves(host=True)
    device = timed(engine.serve, engine.args.device, engine.args.repeats)
    return {"computed": computed, "host": host, "files": files, "device": device}


def decode_step(engine: Engine, store: bool) -> float:
    """Return the median seconds of a decode step of --rows requests, while units are
    stored at full speed or not."""
    args, harness, tiers = engine.args, engine.harness, engine.tiers
    for _ in range(args.rows):
        harness.submit(
            engine.prompt[:64], max_new_tokens=args.steps + 24, ignore_eos=True
        )
    group, pool = tiers.groups[0], tiers.pools[0]
    slots = torch.arange(tiers.unit) + tiers.cache.page_size
    seconds: list[float] = []
    while harness.scheduler.has_work() or harness.io.requests:
        begin = time.perf_counter()
        harness.scheduler.step()
        running = harness.scheduler.running
        if running is not None and len(running) == args.rows:
            seconds.append(time.perf_counter() - begin)
        while store and tiers.mover.free_bytes() > 0:
            tiers.mover.store(group, slots, [pool.memory[0]])
            if args.device == "cpu":
                break
    harness.collect()
    return statistics.median(seconds[8 : 8 + args.steps])


def chat(args: argparse.Namespace, model: Path, *, has_host: bool) -> Json:
    """Return the share of prompt tokens that were cached, and seconds of a turn of all
    users; the first turn, in which nothing can be cached, does not count."""
    length = args.turns * (args.turn_len + args.turn_new)
    options: dict[str, Any] = {"enable_hierarchical_cache": False}
    if has_host:
        options = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
    harness = EngineHarness(
        model,
        load_format="auto" if args.shape == "tiny" else "dummy",
        device=args.device,
        skip_tokenizer_init=True,
        max_total_tokens=args.users * length // 3,
        context_length=args.context_length,
        kv_canary=args.kv_canary,
        **options,
    )
    generator = torch.Generator().manual_seed(2)
    vocab = harness.scheduler.model_config.vocab_size
    histories: list[list[int]] = [[] for _ in range(args.users)]
    cached = total = 0
    seconds = []
    for turn in range(args.turns):
        begin = time.perf_counter()
        rids = []
        for history in histories:
            shape = (args.turn_len,)
            history += torch.randint(0, vocab, shape, generator=generator).tolist()
            rids.append(
                harness.submit(history, max_new_tokens=args.turn_new, ignore_eos=True)
            )
        answers = harness.run()
        seconds.append(time.perf_counter() - begin)
        for rid, history in zip(rids, histories, strict=True):
            if turn:
                cached += answers[rid].cached_tokens
                total += len(history)
            history += answers[rid].output_ids
    return {"hit_rate": cached / total, "turn_s": statistics.mean(seconds[1:])}


def measure(args: argparse.Namespace, folder: Path) -> Json:
    model = folder / "model"
    if args.shape == "tiny":
        write_tiny_model(model, "LlamaForCausalLM", max_position_embeddings=16384)
    else:
        write_shape(args.shape, model)
    bandwidth = copy_bandwidth(args.device, args.repeats)
    engine = Engine(args, model, folder)
    report: Json = {"copies_gb_s": bandwidth, "moves": moves(engine)}
    report["first_token_s"] = hits(engine)
    engine.flush(host=True, files=True)
    report["decode_step_s"] = {
        "alone": decode_step(engine, store=False),
        "storing": decode_step(engine, store=True),
    }
    del engine
    free_memory()
    report["chat"] = {}
    for name, has_host in (("device alone", False), ("with host memory", True)):
        report["chat"][name] = chat(args, model, has_host=has_host)
        free_memory()
    return report


def run(args: argparse.Namespace) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args, Path(folder))
    return {
        "benchmark": "bench_tiers",
        "shape": args.shape,
        "input_len": args.input_len,
        "kv_canary": args.kv_canary,
        "users": args.users,
        **figures,
        **provenance(),
    }


def print_table(report: Json) -> None:
    floor, moved = report["copies_gb_s"], report["moves"]
    rows: list[list[Any]] = [
        ["store", floor["to_host"], moved["store_gb_s"]],
        ["load and compare", floor["to_device"], moved["load_gb_s"]],
    ]
    shown = [[*row, 100 * row[2] / row[1]] for row in rows]
    print(format_table(("GB/s", "copy alone", "ours", "%"), shown))
    print()
    found = report["first_token_s"]
    rows = [
        [name, 1e3 * seconds, seconds / found["computed"]]
        for name, seconds in found.items()
    ]
    print(format_table((f"{report['input_len']} tokens", "ms", "of computed"), rows))
    print()
    steps = report["decode_step_s"]
    more = 100 * (steps["storing"] / steps["alone"] - 1)
    rows = [[1e3 * steps["alone"], 1e3 * steps["storing"], more]]
    print(format_table(("decode step, ms", "while storing", "more, %"), rows))
    print()
    rows = [
        [name, 100 * found["hit_rate"], found["turn_s"]]
        for name, found in report["chat"].items()
    ]
    print(format_table((f"{report['users']} users", "cached, %", "s a turn"), rows))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["tiny", *sorted(SHAPES)])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--input-len", type=int, default=8192)
    parser.add_argument("--slots", type=int, default=65_536)
    parser.add_argument("--context-length", type=int, default=16_384)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn-len", type=int, default=512)
    parser.add_argument("--turn-new", type=int, default=32)
    parser.add_argument("--kv-canary", default="raise")
    parser.add_argument("--output-file")
    parser.set_defaults(shape="Llama-3.1-8B")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_report(parse_args, run, print_table))
