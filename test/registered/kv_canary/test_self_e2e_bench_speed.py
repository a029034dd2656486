"""The canary's cost on the bundled demo model: measured and reported, never judged.

Times on a shared machine prove nothing, so the assertions are about the work alone. The
paired figures that count come from `benchmark/e2e/bench_canary.py`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kv_canary.records import Counter
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count

register_cpu_ci(est_time=5, suite="cpu-serial")
register_cuda_ci(est_time=30, suite="cuda-serial")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = ("none", "partial", "rotate", "all")
ROUNDS = count(ci=1, full=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArgs:
    """One scenario: requests at once, tokens in, tokens out."""

    batch_size: int
    input_len: int
    output_len: int


def _make_server_args(setting: str) -> dict[str, Any]:
    """Fields of `ServerArgs`: "none", or the real-data mode of a canary in `raise`."""
    canary: dict[str, Any] = {"kv_canary": "none"}
    if setting != "none":
        canary = {"kv_canary": "raise", "kv_canary_real_data": setting}
    return {
        "device": DEVICE,
        "max_total_tokens": 8192,
        "max_running_requests": 16,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        **canary,
    }


def _make_bench_args() -> list[BenchArgs]:
    """A long prompt, a batch that decodes, one request that decodes."""
    return [
        BenchArgs(batch_size=1, input_len=count(ci=256, full=768), output_len=1),
        BenchArgs(batch_size=16, input_len=64, output_len=count(ci=8, full=32)),
        BenchArgs(batch_size=1, input_len=64, output_len=count(ci=24, full=64)),
    ]


def _make_scenario_key(bench_args: BenchArgs) -> str:
    return (
        f"bs{bench_args.batch_size}_in{bench_args.input_len}_out{bench_args.output_len}"
    )


def _run_one_canary_setting(setting: str) -> dict[str, float]:
    """Median seconds of each scenario; checks that every token came, checked."""
    harness = EngineHarness(bundled_demo_model_path(), **_make_server_args(setting))
    vocab = harness.scheduler.model_config.vocab_size
    seconds: dict[str, float] = {}
    for bench_args in _make_bench_args():
        times = []
        for i in range(ROUNDS + 1):
            generator = torch.Generator().manual_seed(i)
            for _ in range(bench_args.batch_size):
                ids = torch.randint(
                    0, vocab, (bench_args.input_len,), generator=generator
                )
                harness.submit(
                    ids.tolist(), max_new_tokens=bench_args.output_len, ignore_eos=True
                )
            began = time.perf_counter()
            answers = harness.run()
            times.append(time.perf_counter() - began)
            lengths = [len(answer.output_ids) for answer in answers.values()]
            assert lengths == [bench_args.output_len] * bench_args.batch_size
        seconds[_make_scenario_key(bench_args)] = statistics.median(times[1:])
    manager = harness.scheduler.worker.model_runner.canary_manager
    if setting == "none":
        assert manager is None
    else:
        assert manager is not None and manager.reporter.total == 0
        assert manager.counters[Counter.VERIFIED_SLOTS] > 0
        has_rehashed = manager.counters[Counter.REHASHED_SLOTS] > 0
        assert has_rehashed == (setting in ("rotate", "all"))
    return seconds


def test_bench_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ServerArgs(**_make_server_args("none")).kv_canary == "none"
    results = {setting: _run_one_canary_setting(setting) for setting in SETTINGS}
    lines = []
    for key, base in results["none"].items():
        for setting in SETTINGS[1:]:
            # A clock may not advance over a very short run.
            percent = (results[setting][key] / base - 1) * 100 if base > 0 else 0.0
            lines.append(f"{key:20s} {setting:8s} {percent:+7.2f} %")
    with capsys.disabled():
        print("\nKV canary against none, medians of unpaired runs")
        print("\n".join(lines))
    assert len(lines) == len(_make_bench_args()) * (len(SETTINGS) - 1)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
