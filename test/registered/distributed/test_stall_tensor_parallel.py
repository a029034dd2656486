"""Ranks that stand still stop in the same round, and their clients are told why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import sglang
from sglang.srt.managers.front.scheduler_process import SchedulerProcess
from sglang.srt.managers.messages.errors import EngineFailure
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=10, suite="cpu")

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 2}

# A rank's process: its prefix cache gives back one slot too few. Rank 0 is slow, so
# that a clock of its own would have the other stop first.
RANK = """
import time

from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.managers.scheduler import scheduler_main
from sglang.srt.mem_cache.radix_cache import RadixCache

evict = RadixCache.evict

def evict_too_little(self, num_slots):
    if get_tp_group().rank == 0:
        time.sleep(0.02)
    return evict(self, num_slots - 1)

RadixCache.evict = evict_too_little
scheduler_main.main()
"""


def test_both_ranks_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start = SchedulerProcess.start

    def start_ranks(*args: Any, **kwargs: Any) -> SchedulerProcess:
        return start(*args, command=(sys.executable, "-c", RANK), **kwargs)

    monkeypatch.setattr(SchedulerProcess, "start", staticmethod(start_ranks))
    engine = sglang.Engine(
        model_path=str(write_mock_model(tmp_path / "mock")),
        tp_size=2,
        device="cpu",
        max_total_tokens=320,
    )
    try:
        first: Any = engine.generate(input_ids=list(range(200)), sampling_params=GREEDY)
        assert len(first["output_ids"]) == 2
        with pytest.raises(EngineFailure, match="failed with SchedulerStalled"):
            engine.generate(input_ids=list(range(300, 500)), sampling_params=GREEDY)
    finally:
        engine.shutdown()
    log = capfd.readouterr().err
    for rank in (0, 1):
        assert f"The scheduler of rank {rank} failed" in log
    assert log.count("has stalled: 1 request(s) wait") >= 2
    assert "diverged" not in log


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
