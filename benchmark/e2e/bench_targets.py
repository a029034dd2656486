"""The targets of sampling, two GPUs and starts, measured in one run.

python benchmark/e2e/bench_targets.py                       # two GPUs
python benchmark/e2e/bench_targets.py --gpus 0 --only prefill decode drawn

Runs the project's benchmarks, each in a process of its own, and prints one figure per
target. What needs one GPU runs on all of --gpus at the same time, one at a time on
each; what needs two follows alone. The output of every run goes to --logs. A figure
whose run failed is shown as "not measured", and the exit code is 1. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from sglang.bench_utils.report import Json, format_table, print_report, provenance

HERE = Path(__file__).parent
LIMIT_SECONDS = 420

Figures = Mapping[str, Json]
"""The documents of the runs by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A benchmark.

    Fields:
        command: script and flags. gpus: that it needs.
    """

    command: str
    gpus: int = 1


DRAWN = "--temperature 0.8 --top-p 0.95"
DECODE = "bench_decode.py --batch-size 1 64 256 --steps 60"
CYCLE = "bench_spec.py cycle --steps 48"
TWO = "bench_decode.py --tp-size 2 --batch-size 1 16 64 256 --steps 60"
# The longest first, so that the GPUs end at about the same time.
RUNS = {
    "starts": Run(command="bench_starts.py"),
    "arrivals": Run(command="bench_arrivals.py"),
    "cycle": Run(command=CYCLE),
    "cycle drawn": Run(command=f"{CYCLE} {DRAWN}"),
    "decode": Run(command=DECODE),
    "drawn": Run(command=f"{DECODE} {DRAWN}"),
    "admission": Run(command="bench_admission.py"),
    "prefill": Run(command="bench_prefill.py --case 1x8192 64x1024"),
    "long": Run(
        command="bench_decode.py --batch-size 1 --input-len 120000 "
        "--context-length 131072 --steps 40"
    ),
    "1B": Run(command="bench_decode.py --shape Llama-3.2-1B --batch-size 1"),
    "two": Run(command=TWO, gpus=2),
    "two canary": Run(command=f"{TWO} --kv-canary raise", gpus=2),
    "two starts": Run(command="bench_starts.py --configurations tp2-tree", gpus=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A row of the table.

    Fields:
        of: the runs that it needs. figure: of their documents. peer, must: of one H100,
            or two, with SGLang 0.5.17 (None: none was measured, or none applies
            elsewhere). more: whether more is better.
    """

    what: str
    of: Sequence[str]
    figure: Callable[[Figures], float]
    must: float | None
    peer: float | None = None
    more: bool = False


def step(found: Json, rows: int) -> float:
    """Milliseconds of a decode step."""
    (one,) = (each for each in found["results"] if each["rows"] == rows)
    return float(one["ms_median"])


def share(found: Json, rows: int) -> float:
    """Percent of the floor's speed."""
    (one,) = (each for each in found["results"] if each["rows"] == rows)
    return 100.0 * float(one["floor_ms"]) / float(one["ms_median"])


def cycle(found: Json, nodes: int, rows: int) -> float:
    (one,) = (
        each
        for each in found["results"]
        if each["rows"] == rows and each["tree"] and each["tree"][2] == nodes
    )
    return float(one["ms_median"])


def case(found: Json, name: str, field: str) -> float:
    (one,) = (each for each in found["results"] if each["case"] == name)
    return float(one[field])


def started(found: Json, name: str, field: str = "ready_s") -> float:
    (one,) = (each for each in found["starts"] if each["configuration"] == name)
    return float(one[field])


def more(value: float, base: float) -> float:
    """Percent."""
    return 100.0 * (value / base - 1.0)


def decode_drawn(rows: int) -> Callable[[Figures], float]:
    return lambda f: more(step(f["drawn"], rows), step(f["decode"], rows))


def cycle_drawn(nodes: int, rows: int) -> Callable[[Figures], float]:
    return lambda f: more(
        cycle(f["cycle drawn"], nodes, rows), cycle(f["cycle"], nodes, rows)
    )


def two(rows: int) -> Callable[[Figures], float]:
    return lambda f: step(f["two"], rows)


def two_canary(rows: int) -> Callable[[Figures], float]:
    return lambda f: more(step(f["two canary"], rows), step(f["two"], rows))


def of_starts(name: str, run: str = "starts") -> Callable[[Figures], float]:
    return lambda f: started(f[run], name)


TARGETS = [
    *(
        Target(
            what=f"drawn over greedy, batch {rows}, %",
            of=("decode", "drawn"),
            figure=decode_drawn(rows),
            must=must,
            peer=peer,
        )
        for rows, must, peer in ((64, 3.1, 13.4), (256, 2.6, 5.3))
    ),
    *(
        Target(
            what=f"the same, cycle of {nodes} nodes, batch {rows}, %",
            of=("cycle", "cycle drawn"),
            figure=cycle_drawn(nodes, rows),
            must=3.0,
        )
        for nodes in (64, 4)
        for rows in (1, 16)
    ),
    *(
        Target(
            what=f"two GPUs, decode, batch {rows}, ms",
            of=("two",),
            figure=two(rows),
            must=must,
            peer=peer,
        )
        for rows, must, peer in (
            (1, 3.35, 4.07),
            (16, 4.0, 4.73),
            (64, 5.5, 6.18),
            (256, 11.5, 12.50),
        )
    ),
    *(
        Target(
            what=f"canary on two GPUs, batch {rows}, %",
            of=("two", "two canary"),
            figure=two_canary(rows),
            must=0.5,
        )
        for rows in (16, 64)
    ),
    Target(
        what="KV slots",
        of=("starts",),
        figure=lambda f: started(f["starts"], "plain", "slots"),
        must=414_000,
        peer=414_223,
        more=True,
    ),
    *(
        Target(
            what=f"start, {name}, kernels of plain, s",
            of=("starts",),
            figure=of_starts(name),
            must=must,
        )
        for name, must in (
            ("all", 20.0),
            ("chain+canary", 20.0),
            ("tree", 25.0),
            ("tree+canary", 28.0),
        )
    ),
    Target(
        what="start, two GPUs, tree, s",
        of=("two starts",),
        figure=of_starts("tp2-tree", "two starts"),
        must=20.0,
    ),
    Target(
        what="kernels late to it",
        of=("two starts",),
        figure=lambda f: started(f["two starts"], "tp2-tree", "late_kernels"),
        must=0.0,
        peer=14.0,
    ),
    Target(
        what="admission of 256 cached prompts, ms",
        of=("admission",),
        figure=lambda f: f["admission"]["sides"][0]["parts"]["until the answers"],
        must=90.0,
        peer=174.0,
    ),
    Target(
        what="prefill of 1 x 8,192, ms",
        of=("prefill",),
        figure=lambda f: case(f["prefill"], "1x8192", "ms_median"),
        must=200.0,
        peer=215.9,
    ),
    Target(
        what="prefill of 64 x 1,024, tok/s",
        of=("prefill",),
        figure=lambda f: case(f["prefill"], "64x1024", "tok_s"),
        must=45_500.0,
        peer=42_106.0,
        more=True,
    ),
    Target(
        what="tree cycle of 64 nodes, batch 16, ms",
        of=("cycle",),
        figure=lambda f: cycle(f["cycle"], 64, 16),
        must=26.0,
        peer=42.9,
    ),
    Target(
        what="decode of 1 x 120,000, % of the floor",
        of=("long",),
        figure=lambda f: share(f["long"], 1),
        must=None,
        more=True,
    ),
    Target(
        what="p99 between tokens beside prompts, ms",
        of=("arrivals",),
        figure=lambda f: f["arrivals"]["beside_prompts"]["p99_ms"],
        # 1.5 times that alone, and a chunk.
        must=220.0,
    ),
    Target(
        what="of 1,024 short requests, at once",
        of=("arrivals",),
        figure=lambda f: f["arrivals"]["burst"]["most_at_once"],
        must=1024.0,
        more=True,
    ),
    Target(
        what="1B shape, batch 1, % of the floor",
        of=("1B",),
        figure=lambda f: share(f["1B"], 1),
        must=70.0,
        more=True,
    ),
]


def measure(run: Run, gpus: Sequence[str], log: Path) -> Json | None:
    """Return the document of a run, or None if it failed; its output goes to `log`."""
    script, *flags = shlex.split(run.command)
    command = [sys.executable, str(HERE / script), *flags]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    began, found = time.perf_counter(), None
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=LIMIT_SECONDS,
                check=True,
            )
            errors.write(done.stdout)
            found = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            errors.write(f"{error}\n{getattr(error, 'stdout', None) or ''}")
    seconds = time.perf_counter() - began
    state = "done" if found is not None else f"FAILED, see {log}"
    print(f"{run.command}: {state} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return found


def measure_all(
    names: Sequence[str], gpus: Sequence[str], logs: Path
) -> dict[str, Json]:
    """Return the documents of the runs that succeeded."""
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def log(name: str) -> Path:
        return logs / f"{name.replace(' ', '_')}.log"

    def alone(name: str) -> Json | None:
        gpu = free.get()
        try:
            return measure(RUNS[name], [gpu], log(name))
        finally:
            free.put(gpu)

    on_one = [name for name in names if RUNS[name].gpus == 1]
    with ThreadPoolExecutor(len(gpus)) as pool:
        found = dict(zip(on_one, pool.map(alone, on_one), strict=True))
    for name in names:
        count = RUNS[name].gpus
        if 1 < count <= len(gpus):
            found[name] = measure(RUNS[name], gpus[:count], log(name))
    return {name: report for name, report in found.items() if report is not None}


def judge(target: Target, found: Figures) -> Json:
    row: Json = {"what": target.what, "peer": target.peer, "must": target.must}
    if any(name not in found for name in target.of):
        return row | {"measured": None, "is_met": None}
    value = target.figure(found)
    is_met = None
    if target.must is not None:
        is_met = value >= target.must if target.more else value <= target.must
    return row | {"measured": value, "is_met": is_met}


def print_table(rows: Sequence[Json]) -> None:
    words = {None: "", True: "met", False: "missed"}

    def number(value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

    cells = [
        [
            row["what"],
            *(number(row[name]) for name in ("peer", "must")),
            "not measured" if row["measured"] is None else number(row["measured"]),
            words[row["is_met"]],
        ]
        for row in rows
    ]
    print(format_table(("", "peer, H100", "must, H100", "ours", ""), cells))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", default="0,1")
    parser.add_argument("--only", nargs="+", choices=[*RUNS], default=[*RUNS])
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--output-file")
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="bench_targets_"))
    logs.mkdir(parents=True, exist_ok=True)
    names = [name for name in RUNS if name in args.only]
    found = measure_all(names, args.gpus.split(","), logs)
    rows = [judge(target, found) for target in TARGETS]
    print_table(rows)
    report = {"benchmark": "bench_targets", "rows": rows, "runs": found}
    print_report(report | provenance(), output_file=args.output_file)
    return int(any(row["measured"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
