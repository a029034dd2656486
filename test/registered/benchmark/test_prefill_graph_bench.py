"""The prefill graph benchmark from command line to last line, on a tiny model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from sglang.test import forked_process
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu")

REPO = Path(__file__).resolve().parents[3]
SCRIPT = REPO / "benchmark" / "e2e" / "bench_prefill_graph.py"


@pytest.mark.parametrize("model", ["draft", "target"][: count(ci=1, full=2)])
def test_smoke(model):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tokens", "4", "20"]
    command += ["--seconds", "0.1"] + ["--draft"] * (model == "draft")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO / "python"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = forked_process.run(command, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["model"] == model
    assert [result["tokens"] for result in document["results"]] == [4, 20]
    for result in document["results"]:
        assert 0 < result["replay_host_ms"] <= result["replay_ms"]
        assert result["speedup_canary"] > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
