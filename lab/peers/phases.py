"""Phases of the comparison: each starts its sides, measures and prints a table."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from comparison import Comparison, Side, common_prefix_share
from sides import OURS, Setup

from sglang.bench_utils.report import Json, format_table, ratio
from sglang.bench_utils.worker import BenchWorker, worker_environment
from sglang.bench_utils.workloads import Workload
from sglang.srt.environ import child_environment

SERVER_SCRIPT = Path(__file__).resolve().parents[2] / "benchmark/e2e/server_figures.py"
# Calibration uses the prompts of a round that is never measured.
CALIBRATION_ROUND = -1
FIRST_TOKEN_LENS = (512, 32)
FIRST_TOKEN_SAMPLES = 4  # per round
# Both sides are idle for this long before each sample.
FIRST_TOKEN_PAUSE_SECONDS = 0.05


def run_peers(setup: Setup) -> Json:
    """Compare the engine with transformers and llama.cpp."""
    workloads = setup.workloads
    scenarios: dict[str, Callable[[int], Workload]] = {
        "b1": workloads.sequential,
        "b16": workloads.mixed,
        "b16_equal": workloads.equal,
    }
    ours = setup.engine()
    with (
        setup.start_drafting() as drafting,
        setup.start_transformers() as transformers,
        setup.start_llama() as llama,
    ):
        peers = {"transformers": transformers, "llama_cpp": llama}
        report: Json = {
            "peers": {
                name: "measured" if variants else "not installed"
                for name, variants in peers.items()
            }
        }
        for scenario, make_workload in scenarios.items():
            chosen, calibration = _choose(setup, peers, make_workload)
            comparison = setup.arena.compare(
                [ours, *drafting, *chosen.values()], make_workload, rounds=setup.rounds
            )
            agreement = {
                name: _agreement(comparison, side.name) for name, side in chosen.items()
            }
            report[scenario] = {
                **comparison.report(),
                "calibration_tok_s": calibration,
                "chosen": {name: side.name for name, side in chosen.items()},
                "same_tokens": agreement,
            }
            rows = []
            for (name, side), own in product(chosen.items(), (ours, *drafting)):
                key = "ratio" if name == "transformers" else f"ratio_{name}"
                key += f"_{scenario}" + "_drafting" * (own is not ours)
                value = report[key] = comparison.ratio(own.name, side.name)
                speeds = comparison.median(own.name), comparison.median(side.name)
                bounds = _round_ratios(comparison, side.name, own=own.name)
                label = side.name + ", we draft" * (own is not ours)
                rows.append((label, *speeds, value, *bounds, agreement[name]))
            columns = ("ours tok/s", "peer tok/s", "ratio", "least", "most", "same")
            _print_section((f"{scenario} against", *columns), rows)
    for name, variants in peers.items():
        if not variants:
            print(f"{name}: not installed")
    return report


def _choose(
    setup: Setup,
    peers: dict[str, list[Side]],
    make_workload: Callable[[int], Workload],
) -> tuple[dict[str, Side], dict[str, float]]:
    """Return the fastest variant of each installed peer, and the speed of all."""
    workload = make_workload(CALIBRATION_ROUND)
    chosen: dict[str, Side] = {}
    speeds: dict[str, float] = {}
    for name, variants in peers.items():
        if workload.is_sequential:
            variants = [v for v in variants if v.options.get("groups", 1) == 1]
        if variants:
            chosen[name], found = setup.arena.best(variants, workload)
            speeds |= found
    return chosen, speeds


def _agreement(comparison: Comparison, side: str) -> float:
    """Return the share of equal tokens; rounding lets sides differ at near-ties."""
    pairs = zip(comparison.rounds[OURS], comparison.rounds[side], strict=True)
    return statistics.fmean(
        common_prefix_share(a.answer["outputs"], b.answer["outputs"]) for a, b in pairs
    )


def _round_ratios(
    comparison: Comparison, side: str, *, own: str = OURS
) -> tuple[float | None, ...]:
    """Return the least and greatest ratio of a single round."""
    pairs = zip(comparison.speeds(own), comparison.speeds(side), strict=True)
    ratios = [r for r in (ratio(a, b) for a, b in pairs) if r is not None]
    return (min(ratios), max(ratios)) if ratios else (None, None)


def run_prefix_cache(setup: Setup) -> Json:
    """Compare the engine with and without its prefix cache on shared prompts."""
    ours = setup.engine()
    with setup.start_engine("cache disabled", disable_radix_cache=True) as without:
        comparison = setup.arena.compare(
            [ours, without], setup.workloads.shared_prefix, rounds=setup.rounds
        )
    value = comparison.ratio(OURS, without.name)
    cached = statistics.median(
        m.answer["cached_tokens"] for m in comparison.rounds[OURS]
    )
    rows = [
        (
            "16 x (900 shared + 100 own), 32 new",
            comparison.median(OURS),
            comparison.median(without.name),
            value,
            *_round_ratios(comparison, without.name),
        )
    ]
    columns = ("Prefix cache", "with tok/s", "without", "ratio", "least", "most")
    _print_section(columns, rows)
    return {
        "ratio_shared_prefix": value,
        "shared_prefix": {**comparison.report(), "cached_tokens": cached},
    }


def run_first_token(setup: Setup) -> Json:
    """Compare the time to first token at idle with the bare forward and the floor."""
    worker = setup.engine().worker
    rows, report = [], {}
    with setup.start_forward() as forward:
        for length in FIRST_TOKEN_LENS:
            prompts = [
                setup.workloads.prompt(f"{length} {i}", length)
                for i in range(setup.rounds * FIRST_TOKEN_SAMPLES + 1)
            ]
            figures = _first_token(worker, forward, prompts)
            report[str(length)] = figures
            rows.append((f"{length} tokens", *figures.values()))
        floor: Json = forward.call("floor")
    columns = ("First token (ms)", "engine", "forward", "hot forward", "ratio", "more")
    _print_section(columns, rows)
    print(
        f"floor of a decode step: {floor['floor_ms']:.2f} ms, "
        f"{floor['floor_tok_s']:.0f} tok/s at batch 1 = "
        f"{floor['weight_bytes'] / 1e6:.1f} MB of weights / "
        f"{floor['read_gb_s']:.1f} GB/s (copy {floor['copy_gb_s']:.1f}); "
        f"{floor['resident_floor_ms']:.2f} ms at the {floor['resident_read_gb_s']:.1f} "
        "GB/s of a cache-warm buffer of that size\n"
    )
    return {"first_token": report, "floor": floor}


def _first_token(
    engine: BenchWorker, forward: BenchWorker, prompts: Sequence[list[int]]
) -> dict[str, float | None]:
    """Measure medians in ms of engine and forward in turn, each after a pause."""
    sides: dict[str, Callable[[list[int]], float]] = {
        "engine_ms": lambda prompt: float(engine.call("first_token", prompt=prompt)),
        "forward_ms": lambda prompt: float(forward.call("prefill", prompt=prompt)),
    }
    for run in sides.values():
        run(prompts[0])
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for prompt in prompts[1:]:
        for name, run in sides.items():
            time.sleep(FIRST_TOKEN_PAUSE_SECONDS)
            samples[name].append(run(prompt) * 1e3)
    hot = [forward.call("prefill", prompt=prompt) * 1e3 for prompt in prompts[1:]]
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        **medians,
        "hot_forward_ms": statistics.median(hot),
        "ratio": ratio(medians["engine_ms"], medians["forward_ms"]),
        "difference_ms": medians["engine_ms"] - medians["forward_ms"],
    }


PHASES: dict[str, Callable[[Setup], Json]] = {
    "peers": run_peers,
    "prefix-cache": run_prefix_cache,
    "first-token": run_first_token,
}


def run_server(model_path: str | None, *, rounds: int) -> Json:
    """Measure through HTTP: run `benchmark/e2e/server_figures.py`.

    Raises:
        ValueError: that script failed; its message is on stderr.
    """
    command = [sys.executable, str(SERVER_SCRIPT), "--rounds", str(rounds)]
    if model_path is not None:
        command += ["--model-path", model_path]
    environment = worker_environment(child_environment(), threads=0)
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode:
        raise ValueError(f"--server: {SERVER_SCRIPT.name} failed, see above")
    *table, last = result.stdout.splitlines()
    print("\n".join(table))
    return {"server": json.loads(last)}


def _print_section(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [[c if isinstance(c, (str, float)) else None for c in row] for row in rows]
    print(format_table(columns, cells) + "\n", flush=True)
