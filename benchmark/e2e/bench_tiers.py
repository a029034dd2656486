"""KV that moves between device, host memory and files: bandwidth, hits, disturbance.

python benchmark/e2e/bench_tiers.py                                # GPU, 8B shape
python benchmark/e2e/bench_tiers.py --device cpu --shape tiny      # any machine

Schedulers in this process, with dummy weights. A table is printed as soon as it is
measured; --case chooses:

moves    copies of pinned memory alone, which are the floor; storing and loading the
         units of one prompt; and what the device alone does for them
hits     first token of a prompt of --input-len tokens: computed, from host memory, and
         from the device
decode   --rows requests decode while units are stored as fast as an engine would
files    first token of the prompt from files
chat     --users talk in turns with three times as much KV as the device holds, with
         host memory and without

Medians of --repeats. The last line is one JSON document.
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
from sglang.srt.managers.messages.io_struct import BatchOutput
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_tiny_model

CASES = ("moves", "hits", "decode", "files", "chat")
COPIED_BYTES = 1 << 29
NEW_TOKENS = 1
# Steps until all rows decode and nothing of their start is left.
WARM_STEPS = 8
PERCENTILES = 10


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


def show(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    print(format_table(headers, rows), end="\n\n", flush=True)


def start(args: argparse.Namespace, model: Path, **options: Any) -> EngineHarness:
    """Start a scheduler, and say how long it took."""
    begin = time.perf_counter()
    harness = EngineHarness(
        model,
        load_format="auto" if args.shape == "tiny" else "dummy",
        device=args.device,
        skip_tokenizer_init=True,
        chunked_prefill_size=8192,
        context_length=args.context_length,
        kv_canary=args.kv_canary,
        # Real starts rehearse; the harness leaves it out.
        skip_server_warmup=args.device == "cpu",
        **options,
    )
    print(f"started in {time.perf_counter() - begin:.1f} s", flush=True)
    return harness


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
    """A scheduler with host memory for --ratio of the device's KV, and one prompt.

    Args:
        folder: of files, or None without.
    """

    def __init__(
        self, args: argparse.Namespace, model: Path, folder: Path | None = None
    ) -> None:
        self.args = args
        options: dict[str, Any] = {}
        if folder is not None:
            extra = {"dir": str(folder), "max_gb": 64}
            options = {
                "hicache_storage_backend": "file",
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": json.dumps(extra),
            }
        self.harness = start(
            args,
            model,
            max_total_tokens=args.slots,
            enable_hierarchical_cache=True,
            hicache_ratio=args.ratio,
            **options,
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
        if self.tiers.storage is not None:
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
    """Return GB/s of storing and loading the units of the prompt, of gathering them,
    and of summing them where they lie, as a receiver does to compare them."""
    args, tiers = engine.args, engine.tiers
    floor = copy_bandwidth(args.device, args.repeats)
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
    there = slots.to(args.device)
    summed = timed(lambda: group.layout.slot_sums(there), args.device, args.repeats)
    buffer = torch.empty(
        (count, group.layout.bytes_per_unit), dtype=torch.uint8, device=args.device
    )
    gathered = timed(
        lambda: group.layout.gather(there, buffer), args.device, args.repeats
    )
    found = {
        "bytes": size,
        "unit_bytes": group.layout.bytes_per_unit,
        "copies_gb_s": floor,
        "store_gb_s": size / stored / 1e9,
        "load_gb_s": size / loaded / 1e9,
        "gather_gb_s": size / gathered / 1e9,
        "sums_gb_s": size / summed / 1e9,
        "sums_of_copy": summed * floor["to_device"] * 1e9 / size,
    }
    rows = [
        ["store", floor["to_host"], found["store_gb_s"]],
        ["load and compare", floor["to_device"], found["load_gb_s"]],
        ["gather and sum alone", floor["to_host"], found["gather_gb_s"]],
        ["compare alone", floor["to_device"], found["sums_gb_s"]],
    ]
    shown = [[*row, 100 * row[2] / row[1]] for row in rows]
    show(("GB/s", "copy alone", "ours", "%"), shown)
    return found


def show_first_tokens(args: argparse.Namespace, found: Json) -> None:
    rows = [
        [name, 1e3 * seconds, seconds / found["computed"]]
        for name, seconds in found.items()
    ]
    show((f"{args.input_len} tokens", "ms", "of computed"), rows)


def hits(engine: Engine) -> Json:
    """Return seconds to the first token of the prompt by where its KV is."""
    computed = engine.serves(host=True)
    engine.serve()
    host = engine.serves()
    assert engine.tiers.stats.damaged == 0
    device = timed(engine.serve, engine.args.device, engine.args.repeats)
    found = {"computed": computed, "host": host, "device": device}
    show_first_tokens(engine.args, found)
    return found


def files(engine: Engine) -> Json:
    """Return seconds to the first token of the prompt, computed and from files."""
    found = {
        "computed": engine.serves(host=True, files=True),
        "files": engine.serves(host=True),
    }
    assert engine.tiers.stats.damaged == 0
    show_first_tokens(engine.args, found)
    return found


def decode_step(engine: Engine, *, has_stores: bool) -> Json:
    """Return the median seconds of a decode step of --rows requests, and GB/s of units
    that are stored beside it: as many a step as an engine may."""
    args, harness, tiers = engine.args, engine.harness, engine.tiers
    for _ in range(args.rows):
        harness.submit(
            engine.prompt[:64],
            max_new_tokens=args.steps + 2 * WARM_STEPS + args.rows,
            ignore_eos=True,
        )
    group, pool = tiers.groups[0], tiers.pools[0]
    unit_bytes = group.layout.bytes_per_unit
    ends: list[float] = []
    stored = 0
    while harness.scheduler.has_work() or harness.io.requests:
        harness.scheduler.step()
        running = harness.scheduler.running
        if running is None or len(running) < args.rows:
            continue
        if has_stores:
            count = min(tiers.free_bytes() // unit_bytes, pool.size)
            slots = torch.arange(count * tiers.unit) + tiers.cache.page_size
            tiers.mover.store(group, slots, [pool.memory[at] for at in range(count)])
            stored += count * unit_bytes
        ends.append(time.perf_counter())
    harness.collect()
    steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return {
        "step_s": statistics.median(steps[WARM_STEPS : WARM_STEPS + args.steps]),
        "gb_s": stored / (ends[-1] - ends[0]) / 1e9,
    }


def decode(engine: Engine) -> Json:
    """Return a decode step alone and beside stores, by turns."""
    rounds = [
        (
            decode_step(engine, has_stores=False),
            decode_step(engine, has_stores=True),
        )
        for _ in range(engine.args.rounds)
    ]
    alone = statistics.median(before["step_s"] for before, _ in rounds)
    beside = statistics.median(after["step_s"] for _, after in rounds)
    rate = statistics.median(after["gb_s"] for _, after in rounds)
    more = 100 * (beside / alone - 1)
    rows = [[engine.args.rows, 1e3 * alone, 1e3 * beside, more, rate]]
    show(("rows", "step, ms", "while storing", "more, %", "GB/s stored"), rows)
    return {"alone": alone, "storing": beside, "stored_gb_s": rate}


class Chat:
    """Users who talk in turns, all at once."""

    def __init__(self, args: argparse.Namespace, harness: EngineHarness) -> None:
        self.args = args
        self.harness = harness
        self.histories: list[list[int]] = [[] for _ in range(args.users)]
        self._generator = torch.Generator().manual_seed(2)
        self.cached = self.said = 0
        self.seconds: list[float] = []
        self.firsts: list[float] = []

    def turn(self, *, counts: bool) -> None:
        args, harness = self.args, self.harness
        vocab, shape = harness.scheduler.model_config.vocab_size, (args.turn_len,)
        rids = []
        before = sum(len(history) for history in self.histories)
        for history in self.histories:
            said = torch.randint(0, vocab, shape, generator=self._generator)
            history += said.tolist()
            rids.append(
                harness.submit(
                    history,
                    max_new_tokens=args.turn_new,
                    ignore_eos=True,
                    stream=True,
                )
            )
        begin = time.perf_counter()
        firsts: dict[str, float] = {}
        seen = 0

        def note(step: int) -> None:
            nonlocal seen
            now = time.perf_counter() - begin
            for message in harness.io.responses[seen:]:
                if isinstance(message, BatchOutput):
                    for output in message.outputs:
                        firsts.setdefault(output.rid, now)
            seen = len(harness.io.responses)

        answers = harness.run(on_step=note)
        seconds = time.perf_counter() - begin
        for rid, history in zip(rids, self.histories, strict=True):
            if counts:
                self.cached += answers[rid].cached_tokens
            history += answers[rid].output_ids
        if counts:
            self.said += before
            self.seconds.append(seconds)
            self.firsts += list(firsts.values())


def chat(args: argparse.Namespace, model: Path) -> Json:
    """Return the share of what was said before that was cached, and seconds to the
    first token and of a turn of all users, with host memory and without. The first turn
    does not count."""
    length = args.turns * (args.turn_len + args.turn_new)
    tiers = {"enable_hierarchical_cache": True, "hicache_ratio": args.chat_ratio}
    variants: list[tuple[str, dict[str, Any]]] = [
        ("device alone", {}),
        ("with host memory", tiers),
    ]
    found: Json = {}
    for name, options in variants:
        slots = args.users * length // 3
        harness = start(args, model, max_total_tokens=slots, **options)
        talk = Chat(args, harness)
        for turn in range(args.turns):
            talk.turn(counts=turn > 0)
        found[name] = {
            "hit_rate": talk.cached / talk.said,
            "ttft_p50_s": statistics.median(talk.firsts),
            "ttft_p90_s": statistics.quantiles(talk.firsts, n=PERCENTILES)[-1],
            "turn_s": statistics.mean(talk.seconds),
        }
        row = [100 * found[name]["hit_rate"], *list(found[name].values())[1:]]
        headers = (f"{args.users} users", "cached, %", "first token, s", "p90", "turn")
        show(headers, [[name, *row]])
        del talk, harness
        free_memory()
    return found


def measure(args: argparse.Namespace, folder: Path) -> Json:
    model = folder / "model"
    if args.shape == "tiny":
        write_tiny_model(model, "LlamaForCausalLM", max_position_embeddings=16384)
    else:
        write_shape(args.shape, model)
    report: Json = {}
    if {"moves", "hits", "decode"} & set(args.case):
        engine = Engine(args, model)
        if "moves" in args.case:
            report["moves"] = moves(engine)
        if "hits" in args.case:
            report["first_token_s"] = hits(engine)
            engine.flush(host=True)
        if "decode" in args.case:
            report["decode_step_s"] = decode(engine)
        del engine
        free_memory()
    if "files" in args.case:
        report["files_s"] = files(Engine(args, model, folder / "kv"))
        free_memory()
    if "chat" in args.case:
        report["chat"] = chat(args, model)
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


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["tiny", *sorted(SHAPES)])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--case", choices=CASES, nargs="+", default=CASES)
    parser.add_argument("--input-len", type=int, default=8192)
    parser.add_argument("--slots", type=int, default=32_768)
    parser.add_argument("--context-length", type=int, default=16_384)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-len", type=int, default=512)
    parser.add_argument("--turn-new", type=int, default=32)
    parser.add_argument("--chat-ratio", type=float, default=3.2)
    parser.add_argument("--kv-canary", default="raise")
    parser.add_argument("--output-file")
    parser.set_defaults(shape="Llama-3.1-8B")
    return parser.parse_args(argv)


def show_nothing(report: Json) -> None:
    """Do nothing: every table was shown when it was measured."""


if __name__ == "__main__":
    sys.exit(run_report(parse_args, run, show_nothing))
