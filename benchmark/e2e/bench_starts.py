"""Starts of a server of each configuration, and kernels that come late to it.

python benchmark/e2e/bench_starts.py                                # GPU, 8B shape
python benchmark/e2e/bench_starts.py --configurations chain tree --again
python benchmark/e2e/bench_starts.py --device cpu --configurations plain all

The plain server starts first, with an empty cache of compiled kernels. Each other
configuration starts with what that one compiled, and with --again once more with its
own kernels. Shown are the seconds until the server is healthy, the kernels that it
compiled, its KV slots, and the kernels that were loaded while it served --requests
requests of random lengths after that. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_arrivals import OPTIONS, byte_model, check, random_request
from model_shapes import SHAPES, write_draft_shape
from spec_trees import Tree

from sglang.bench_utils.http_load import LoadClient, LoadPace, run_load
from sglang.bench_utils.launch import run_report
from sglang.bench_utils.local_server import LocalServer
from sglang.bench_utils.report import Json, format_table, provenance

CACHE = "TRITON_CACHE_DIR"
PLAIN = "plain"
LATE = re.compile(r"^sglang:kernel_loads_after_ready_total\S* (\S+)$", re.MULTILINE)
MOST_TOKENS = 700
"""Of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Flags of a server.

    Fields:
        flags: without those of a draft. tree: of an EAGLE3 head; None without.
    """

    flags: tuple[str, ...] = ()
    tree: Tree | None = None


CANARY = ("--kv-canary", "raise")
CHAIN, TREE = Tree(1, 3, 4), Tree(8, 5, 64)
CONFIGURATIONS: Mapping[str, Configuration] = {
    PLAIN: Configuration(),
    "all": Configuration(flags=(*CANARY, "--kv-canary-real-data", "all")),
    "chain": Configuration(tree=CHAIN),
    "chain+canary": Configuration(flags=CANARY, tree=CHAIN),
    "tree": Configuration(tree=TREE),
    "tree+canary": Configuration(flags=CANARY, tree=TREE),
    "tp2-tree": Configuration(flags=("--tp-size", "2"), tree=TREE),
}


def server_flags(args: argparse.Namespace, folder: Path, name: str) -> list[str]:
    configuration = CONFIGURATIONS[name]
    model = byte_model(args.shape, folder / "target")
    flags = ["--model-path", str(model), "--load-format", "dummy", "--enable-metrics"]
    flags += ["--device", args.device, "--context-length", "16384"]
    if (tree := configuration.tree) is not None:
        draft = write_draft_shape(args.shape, folder / "draft")
        flags += ["--speculative-algorithm", "EAGLE3"]
        flags += ["--speculative-draft-model-path", str(draft), "--page-size", "64"]
        for flag, value in tree.flags().items():
            flags += ["--" + flag.replace("_", "-"), str(value)]
    return [*flags, *configuration.flags, *args.server_flags]


async def use(server: LocalServer, requests: int) -> Json:
    """Serve requests of random lengths. Returns the KV slots and the late kernels."""
    rng = random.Random(5)
    wanted = [
        random_request(rng, rng.randint(1, MOST_TOKENS), rng.randint(1, 64))
        for _ in range(requests)
    ]
    async with LoadClient(server.url, backend="sglang") as client:
        # One by one, a few, and all the others at once.
        for part in (wanted[:3], wanted[3:10], wanted[10:]):
            pace = LoadPace(max_concurrency=1 if part is wanted[:3] else None)
            check((await run_load(client, part, options=OPTIONS, pace=pace))[0])
        info = await client.get_json("/server_info") or {}
        async with client.session.get(server.url + "/metrics") as response:
            found = LATE.findall(await response.text())
    return {
        "slots": info["max_total_num_tokens"],
        "late_kernels": int(sum(map(float, found))),
    }


def compiled(cache: Path) -> int:
    return sum(1 for _ in cache.rglob("*.cubin"))


def start(args: argparse.Namespace, name: str, cache: Path) -> Json:
    """Start a server with the kernels in `cache`, which gets those that it compiles."""
    before = compiled(cache)
    os.environ[CACHE] = str(cache)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalServer(server_flags(args, Path(folder), name)) as server,
    ):
        new = compiled(cache) - before
        used = asyncio.run(use(server, args.requests))
    return {"ready_s": server.ready_seconds, "compiled": new, **used}


def run(args: argparse.Namespace) -> Json:
    starts: list[Json] = []

    def begin(name: str, kernels: str, cache: Path) -> None:
        found = start(args, name, cache)
        starts.append({"configuration": name, "kernels": kernels, **found})
        print(starts[-1], file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, PLAIN)
        plain.mkdir()
        begin(PLAIN, "none", plain)
        for name in args.configurations:
            cache = Path(folder, "own")
            shutil.copytree(plain, cache)
            begin(name, "of plain", cache)
            if args.again:
                begin(name, "its own", cache)
            shutil.rmtree(cache)
    return {
        "benchmark": "bench_starts",
        "shape": args.shape,
        "requests": args.requests,
        "starts": starts,
        **provenance(),
    }


def print_table(report: Json) -> None:
    columns = ("ready_s", "compiled", "late_kernels", "slots")
    rows = [
        [f"{found['configuration']}, kernels: {found['kernels']}"]
        + [f"{found['ready_s']:.1f}", *(found[name] for name in columns[1:])]
        for found in report["starts"]
    ]
    print(format_table(("start", "s", "compiled", "late", "KV slots"), rows))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*CONFIGURATIONS]
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    # Two GPUs are asked for by name.
    parser.add_argument(
        "--configurations", nargs="+", choices=names, default=names[1:-1]
    )
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--server-flags", nargs=argparse.REMAINDER, default=[])
    parser.add_argument("--output-file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_report(parse_args, run, print_table))
