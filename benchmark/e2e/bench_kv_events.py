"""Cost of KV events: pairs of batches with and without them, in one process.

python benchmark/e2e/bench_kv_events.py --pairs 20

Two schedulers with the same weights, one of which publishes to a subscriber in another
process, take turns with batches of new random prompts: `prefill` asks for one token of
each, `decode` for many. The pools are small, so that every batch evicts. The figure is
the paired difference in percent, its median with a 95 % interval (--clock cpu counts
this process alone). Besides, the time on the scheduler's thread for the blocks of 8,192
tokens: hashing and recording, then encoding and handing over. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import bench_canary
import numpy as np
from bench_canary import CLOCKS, alternate, timed
from served import build_served

from sglang.bench_utils.launch import run_report
from sglang.bench_utils.report import Json, format_table, provenance
from sglang.srt.arg_groups.kv_events_hook import KVEventsConfig
from sglang.srt.kv_events.block_recorder import BlockRecorder
from sglang.srt.kv_events.event_publisher import ZmqEventPublisher
from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.mem_cache.tree_node import TreeNode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.paths import bundled_demo_model_path

# (requests, prompt tokens, new tokens) of a batch.
BATCHES = {"prefill": (8, 500, 1), "decode": (16, 16, 64)}
MICRO_TOKENS = 8192
MICRO_REPEATS = 20
READER = """
import sys, zmq
events = zmq.Context().socket(zmq.SUB)
events.subscribe("")
events.connect(sys.argv[1])
while True:
    events.recv_multipart()
"""


class Side:
    """One scheduler; `config`: its --kv-events-config."""

    def __init__(self, args: argparse.Namespace, config: str | None) -> None:
        self.io = ListIO()
        self.scheduler = build_served(
            ServerArgs(
                model_path=args.model_path or str(bundled_demo_model_path()),
                skip_tokenizer_init=True,
                page_size=args.page_size,
                max_total_tokens=args.slots,
                kv_events_config=config,
            ),
            self.io,
        )

    def run(self, kind: str, seed: int) -> float:
        """Return the seconds of a batch."""
        rng = random.Random(seed)
        number, length, new = BATCHES[kind]
        vocab = self.scheduler.model_config.vocab_size
        params = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        for i in range(number):
            ids = [rng.randrange(vocab) for _ in range(length)]
            self.io.requests.append(
                GenerateReq(rid=str(i), input_ids=ids, sampling_params=params)
            )
        seconds = timed(self._drain)
        self.io.responses.clear()
        return seconds

    def _drain(self) -> None:
        while self.io.requests or self.scheduler.has_work():
            self.scheduler.step()


def compare(off: Side, on: Side, kind: str, pairs: int) -> dict[str, float]:
    """Return milliseconds of a batch and the added percent, as in `paired`."""
    for side in (off, on):
        side.run(kind, 0)
    return alternate((off, on), pairs, lambda side, i: side.run(kind, 1 + i))


def micro(page_size: int, endpoint: str) -> dict[str, float]:
    """Return milliseconds on the scheduler's thread for the blocks of a prompt."""
    publisher = ZmqEventPublisher(KVEventsConfig(publisher="zmq", endpoint=endpoint))
    recorder = BlockRecorder(page_size=page_size, bigram=False)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"record": [], "publish": []}
    for _ in range(MICRO_REPEATS):
        tokens = rng.integers(0, 128_000, MICRO_TOKENS)
        node = TreeNode(parent=TreeNode(), elements=tokens, slots=tokens)
        began = time.perf_counter()
        recorder.on_stored(node)
        recorded = time.perf_counter()
        publisher.publish(recorder.take())
        times["publish"].append(time.perf_counter() - recorded)
        times["record"].append(recorded - began)
        time.sleep(0.002)
    publisher.close()
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def measure(args: argparse.Namespace) -> Json:
    bench_canary.clock = CLOCKS[args.clock]
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        config = {
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": f"ipc://{folder}/replays",
        }
        reader = subprocess.Popen([sys.executable, "-c", READER, endpoint])
        try:
            off, on = Side(args, None), Side(args, json.dumps(config))
            batches = {kind: compare(off, on, kind, args.pairs) for kind in args.kinds}
            stats = on.scheduler.stats_snapshot()
        finally:
            reader.kill()
            reader.wait()
        return {
            "clock": args.clock,
            "pairs": args.pairs,
            "page_size": args.page_size,
            "batches": batches,
            "events": stats.kv_events_published_total,
            "ms_per_8192_tokens": {
                size: micro(size, f"ipc://{Path(folder)}/micro{size}")
                for size in (1, 16, 64)
            },
            "provenance": provenance(),
        }


def show(report: Json) -> None:
    print(
        format_table(
            ["batch", "ms without", "added %", "from", "to"],
            [
                [kind, f["off_ms"], f["percent"], f["low"], f["high"]]
                for kind, f in report["batches"].items()
            ],
        )
    )
    print()
    print(
        format_table(
            ["ms per 8,192 tokens", "record", "publish"],
            [
                [f"pages of {size}", f["record"], f["publish"]]
                for size, f in report["ms_per_8192_tokens"].items()
            ],
        )
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", help="default: the bundled demo model")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--output-file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_report(parse, measure, show))
