"""The host's reports: the periodic line, the findings of a forward that fails, and the
owner of a slot by the host's records."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_canary.evidence import Owner
from kv_canary.records import NUM_COUNTERS, Counter
from kv_canary.reporter import CanaryViolation
from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    tensor_parallel_group,
)
from sglang.srt.forward.batch import ForwardBatch
from sglang.srt.kv_canary.runner.stats_logger import StatsLogger
from sglang.srt.managers.scheduler.build import _last_message
from sglang.srt.managers.scheduler.slot_owners import SlotOwners
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness

register_cpu_ci(est_time=8, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")


def fail(batch: ForwardBatch) -> None:
    raise KeyError("boom")


def decoding(model: Path, mode: str, **options: Any) -> EngineHarness:
    """An engine in which request a decodes."""
    harness = EngineHarness(
        model,
        max_total_tokens=2048,
        skip_tokenizer_init=True,
        kv_canary=mode,
        kv_canary_real_data="all",
        **options,
    )
    harness.submit(list(range(40)), rid="a", max_new_tokens=60, ignore_eos=True)
    for _ in range(6):
        harness.scheduler.step()
    return harness


class TestFailedForward:
    """A forward that fails takes its result with it, but not its findings."""

    @staticmethod
    def damage(harness: EngineHarness, slot: int) -> None:
        """The request's sixth position is another one's slot."""
        (req,) = harness.scheduler.running.reqs
        runner = harness.scheduler.worker.model_runner
        runner.req_to_token_pool.req_to_token[req.req_pool_idx, 5] = slot

    @staticmethod
    def violations(harness: EngineHarness) -> list[dict[str, Any]]:
        manager = harness.scheduler.worker.model_runner.canary_manager
        return [v for i in manager.reporter.incidents for v in i["violations"]]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="reads outside of the pool")
    @pytest.mark.parametrize("slot", [5000, -3])
    def test_a_slot_outside_of_the_pool_is_reported(
        self, model: Path, slot: int
    ) -> None:
        harness = decoding(model, "raise")
        self.damage(harness, slot)
        with pytest.raises(CanaryViolation, match="fail_reason=read_set") as raised:
            harness.run()
        assert "has slots 0 .. 2048" in str(raised.value.__cause__)
        (found,) = self.violations(harness)
        assert (found["rid"], found["position"]) == ("a", 5)

    @pytest.mark.parametrize("mode", ["log", "raise"])
    @pytest.mark.parametrize("overlap", [False, True])
    def test_what_was_found_before_a_failure(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, mode: str, overlap: bool
    ) -> None:
        harness = decoding(model, mode, overlap=overlap)
        runner = harness.scheduler.worker.model_runner
        forward = runner.forward

        def failing(batch: ForwardBatch) -> None:
            forward(batch)
            fail(batch)

        monkeypatch.setattr(runner, "forward", failing)
        self.damage(harness, 2000)
        expected = CanaryViolation if mode == "raise" else KeyError
        with pytest.raises(expected) as raised:
            harness.run()
        (found,) = self.violations(harness)
        assert (found["rid"], found["slot"], found["position"]) == ("a", 2000, 5)
        if mode == "raise":
            assert isinstance(raised.value.__cause__, KeyError)
            told = _last_message(raised.value, harness.scheduler.own_incidents())
            assert told.message == raised.value.public
            assert [v for i in told.incidents for v in i["violations"]] == [found]

    @pytest.mark.parametrize("mode", ["log", "raise"])
    def test_a_failure_without_findings_stays_what_it_is(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, mode: str
    ) -> None:
        harness = decoding(model, mode)
        runner = harness.scheduler.worker.model_runner
        monkeypatch.setattr(runner, "forward", fail)
        with pytest.raises(KeyError):
            harness.run()
        assert self.violations(harness) == []

    def test_a_device_that_is_gone_hides_no_failure(
        self,
        model: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        harness = decoding(model, "raise")
        runner = harness.scheduler.worker.model_runner

        def gone(**records: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

        monkeypatch.setattr(runner, "forward", fail)
        monkeypatch.setattr(runner.canary_manager, "drain", gone)
        with pytest.raises(KeyError):
            harness.run()
        # An engine that is not warmed up also warns of each kernel it loads on a GPU.
        (record,) = (r for r in caplog.records if r.levelno >= logging.ERROR)
        assert "cannot be read: CUDA error" in record.getMessage()

    def test_clients_hear_of_it_without_the_other_ranks(self) -> None:
        """They may wait in a collective of the forward that failed here."""
        error = CanaryViolation("all of it", public="a part", is_alone=True)
        with tensor_parallel_group(TensorParallelGroup(rank=1, size=2)):
            assert _last_message(error, []).message == "a part"


class TestSlotOwners:
    """The owner of a slot, as incidents name it."""

    def test_owners(self, model: Path) -> None:
        harness = decoding(model, "log")
        cache, (req,) = harness.scheduler.cache, harness.scheduler.running.reqs
        owners = SlotOwners(cache, lambda: [req])
        row = cache.req_to_token_pool.row_slots(
            req.req_pool_idx, 0, req.allocated_len
        ).tolist()
        assert owners.owner_of(row[5]) == Owner(
            "prefix cache",
            is_shared=True,
            is_allocated=True,
            prefix_of=frozenset({req.serial}),
        )
        assert owners.owner_of(row[-1]) == Owner(
            'request "a"', is_allocated=True, claims=(req.serial,)
        )
        (taken,) = cache.allocator.alloc(1).tolist()
        size = cache.allocator.size
        asked = (-1, 0, taken, size, size + 1, 10**9)
        assert [SlotOwners(cache, list).owner_of(slot).text for slot in asked] == [
            "none",
            "scratch page",
            "owned, holder unknown",
            "free",
            "outside the pool",
            "outside the pool",
        ]

    def test_an_incident_asks_the_cache_once(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness = decoding(model, "log")
        cache, (req,) = harness.scheduler.cache, harness.scheduler.running.reqs
        manager = harness.scheduler.worker.model_runner.canary_manager
        asked: list[None] = []
        cached_slots = cache.cached_slots
        monkeypatch.setattr(
            cache, "cached_slots", lambda: (asked.append(None), cached_slots())[1]
        )
        slots = cache.req_to_token_pool.row_slots(req.req_pool_idx, 0, 30)
        manager.target.buffers.state.tail[
            slots.to(manager.target.kv_pool.device), 3
        ] += 1
        while not manager.reporter.incidents:
            assert asked == []
            harness.scheduler.step()
        assert len(manager.reporter.incidents[-1]["violations"]) == 30
        assert asked == [None]


class TestStatsLogger:
    """The periodic line."""

    def test_line_and_interval(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        stats = StatsLogger(10, pool="draft")
        for step in range(1, 26):
            counters = [0] * NUM_COUNTERS
            counters[Counter.TAIL_LAUNCHES] = counters[Counter.VERIFY_LAUNCHES] = step
            counters[Counter.VERIFIED_SLOTS] = 100 * step
            if step > 15:
                counters[Counter.SWEEP_LAUNCHES] = 2
            stats.on_counters(counters, violations=step // 20)
        assert [record.getMessage() for record in caplog.records] == [
            "[canary] step=10 protected_tokens=1000 sweep_passes=0 violations=0 "
            "launch_tags_active=verify,tail pool=draft",
            "[canary] step=20 protected_tokens=2000 sweep_passes=2 violations=1 "
            "launch_tags_active=verify,tail,sweep pool=draft",
        ]
        assert all(record.levelno == logging.INFO for record in caplog.records)

    def test_busy_engines_log_once_a_minute(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        now = 1000.0
        stats = StatsLogger(100, pool="target", seconds=60.0, clock=lambda: now)
        for step in range(1, 10_001):
            now += 1 / 64
            stats.on_counters([step] * NUM_COUNTERS, violations=0)
        steps = [
            record.getMessage().split()[1].removeprefix("step=")
            for record in caplog.records
        ]
        assert steps == ["100", "3940", "7780"]

    def test_zero_is_never(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        stats = StatsLogger(0, pool="target")
        for step in range(500):
            stats.on_counters([step] * NUM_COUNTERS, violations=0)
        assert not caplog.records


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
