"""A canary that does not run is noticed; counters; launches beside the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from forward_world import (
    canary_of,
    decode_batch,
    findings,
    prefilled,
)

from kv_canary.records import (
    NUM_COUNTERS,
    Counter,
    Phase,
)
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.forward.graph_capture import SideStream
from sglang.srt.kv_canary.api import (
    _extract_forward_batch,
)
from sglang.srt.kv_canary.runner import health_checker
from sglang.srt.kv_canary.runner.health_checker import HealthChecker
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=6, suite="cuda")

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


def skip_the_tail(harness: ForwardHarness) -> None:
    """Run the model without the launch after it from now on."""
    manager, model = canary_of(harness), harness.runner.model
    forward: Callable[..., Any] = type(model).forward

    def halfway(*args: Any, **kwargs: Any) -> Any:
        manager.pre_ops_maybe_inside_graph(_extract_forward_batch(args, kwargs))
        return forward(model, *args, **kwargs)

    model.__dict__["forward"] = halfway


class TestHealth:
    """The canary cannot be silently off."""

    @pytest.mark.parametrize("mode", ["log", "raise"])
    def test_a_skipped_tail_stops_at_once(self, model: Path, mode: str) -> None:
        """Nothing of a forward whose findings were not written is believed."""
        harness = ForwardHarness(model, slots=512, kv_canary=mode)
        row = harness.new_row([1] * 40)
        harness.run(harness.prepare(EXTEND, [(row, 5)]))
        for _ in range(3):
            harness.run(decode_batch(harness, row))
        skip_the_tail(harness)
        with pytest.raises(RuntimeError, match="not running: no tail launch"):
            harness.run(decode_batch(harness, row))

    def test_a_launch_out_of_order_is_a_phase_breach(
        self, harness: ForwardHarness
    ) -> None:
        row = harness.new_row([1] * 40)
        harness.run(harness.prepare(EXTEND, [(row, 5)]))
        canary_of(harness).target.buffers.state.phase.fill_(Phase.AFTER_HEAD)
        (found,) = findings(harness, decode_batch(harness, row))
        assert found["reasons"] == ["phase"]

    @pytest.mark.parametrize(
        "counter",
        [Counter.VERIFY_LAUNCHES, Counter.HEAD_LAUNCHES, Counter.TAIL_LAUNCHES],
    )
    def test_each_launch_is_watched(self, counter: Counter) -> None:
        def result(step: int) -> list[int]:
            counters = [step] * NUM_COUNTERS
            counters[counter] = min(step, 250)
            return counters

        checker = HealthChecker()
        for step in range(1, 300):
            checker.on_result(result(step))
        with pytest.raises(RuntimeError, match=f"{counter.name.lower()} advanced"):
            for step in range(300, 400):
                checker.on_result(result(step))

    def test_warm_up_is_not_judged(self) -> None:
        checker = HealthChecker()
        for _ in range(health_checker.WARM_UP_FORWARDS):
            checker.on_result([0] * NUM_COUNTERS)


class TestStats:
    """The periodic line."""

    def test_of_a_running_canary(
        self,
        model: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS", "5")
        harness = ForwardHarness(model, slots=512, kv_canary="raise")
        caplog.set_level(logging.INFO)
        row = harness.new_row([1] * 20)
        harness.run(harness.prepare(EXTEND, [(row, 4)]))
        for _ in range(9):
            harness.run(decode_batch(harness, row))
        lines = [
            record.getMessage()
            for record in caplog.records
            if record.getMessage().startswith("[canary]")
        ]
        assert lines == [
            f"[canary] step={step} protected_tokens={protected} sweep_passes=0 "
            "violations=0 launch_tags_active=verify,head,tail pool=target"
            for step, protected in ((5, sum(range(4, 8))), (10, sum(range(4, 13))))
        ]


class LoggedStream:
    """A stream that notes when it waits for another."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: LoggedStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=lambda mode: mode.name)
def test_the_tail_runs_beside_the_head(
    harness: ForwardHarness, mode: ForwardMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on a stream that has seen the stack's last layer, and that is waited for;
    after the head of a small decode step."""
    log: list[str] = []
    manager, model = canary_of(harness), harness.runner.model
    main, side = LoggedStream("main", log), LoggedStream("side", log)
    forked = SideStream(side, current=lambda: main, entering=lambda _: nullcontext())
    (row,) = prefilled(harness, 9)
    one = manager._managers[0]
    monkeypatch.setattr(manager.order, "side", forked)

    def note(owner: object, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args: (log.append(name), function(*args))[1]
        )

    note(one, "post_ops_maybe_inside_graph")
    note(model, "forward_head")
    if mode is DECODE:
        assert findings(harness, decode_batch(harness, row)) == []
        assert log == ["forward_head", "post_ops_maybe_inside_graph"]
        return
    batch = harness.prepare(EXTEND, [(harness.new_row(list(range(7))), 7)])
    assert findings(harness, batch) == []
    assert log == [
        "side waits for main",
        "post_ops_maybe_inside_graph",
        "forward_head",
        "main waits for side",
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
