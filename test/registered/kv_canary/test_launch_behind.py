"""The launch before a model whose layers are one replayed graph: it follows the start
of the graph, and finds the same faults as before it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from forward_world import canary_of, decode_batch, findings

from kv_canary import launches
from kv_canary.evidence import Owner
from kv_canary.records import POISON_WORD
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.forward.graph_capture import BreakableGraph, SideStream
from sglang.srt.kv_canary.perturb import driver_of
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
from sglang.srt.kv_canary.runner.details import HostBooks
from sglang.srt.model_executor.breakable_cuda_graph_runner import (
    BreakableCudaGraphRunner,
)
from sglang.srt.model_executor.cuda_graph_runner import cuda_graph_backend
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.recording_backend import RecordingBackend

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=10, suite="cuda")

EXTEND = ForwardMode.EXTEND
ON_GPU = torch.cuda.is_available()
BUCKETS = [8, 32]
# Of one request in a whole graph, of one in a segmented one, of several.
SHAPES = {"short": (7,), "two": (5, 9)}


class NotedStream:
    """A stream that notes when it waits for another."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: NotedStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class World:
    """Forwards that replay prefill graphs, with a side stream on every device.

    Attributes:
        log: waits of streams, launches and replays, in the host's order; on a GPU
            without the waits.
    """

    def __init__(self, model: Path, real_data: str = "partial") -> None:
        self.harness = ForwardHarness(
            model, slots=512, kv_canary="log", kv_canary_real_data=real_data
        )
        self.manager: CanaryManager = canary_of(self.harness)
        self.log: list[str] = []
        self.harness.runner.prefill_graph_runner = BreakableCudaGraphRunner(
            self.harness.runner,
            token_counts=BUCKETS,
            make_backend=cuda_graph_backend if ON_GPU else RecordingBackend,
        )
        if not ON_GPU:
            main, side = NotedStream("main", self.log), NotedStream("side", self.log)
            self.manager.order.side = SideStream(
                side, current=lambda: main, entering=lambda _: nullcontext()
            )
        self.manager.mark_init_finished()

    def note(self, patch: pytest.MonkeyPatch) -> None:
        """Log launches and replays from now on."""
        for owner, name in (
            (launches, "before_model"),
            (launches, "write_tail"),
            (launches, "poison"),
            (launches, "expect_rows"),
            (BreakableGraph, "replay"),
        ):
            patch.setattr(owner, name, self._noted(name, getattr(owner, name)))

    def _noted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.log.append(name)
            return function(*args, **kwargs)

        return call

    def prefill(self, *lengths: int, cached: int = 0) -> Any:
        """A batch that prefills new rows, the first after `cached` tokens of its own
        that were written before; one token of each is still to be decoded."""
        harness = self.harness
        ends = [cached * (i == 0) + n for i, n in enumerate(lengths)]
        rows = [harness.new_row(list(range(3, 4 + end))) for end in ends]
        if cached:
            harness.run(harness.prepare(EXTEND, [(rows[0], cached)]))
        return harness.prepare(EXTEND, list(zip(rows, ends, strict=True)))

    def freed_prefix(self) -> tuple[Any, torch.Tensor]:
        """A batch that goes on from slots which their owner has just freed."""
        harness = self.harness
        owner = harness.new_row(list(range(40, 48)))
        harness.run(harness.prepare(EXTEND, [(owner, 8)]))
        borrower = harness.new_row(harness.tokens(owner) + [9], borrow=(owner, 8))
        batch = harness.prepare(EXTEND, [(borrower, 9)])
        slots = harness.pool.row_slots(owner, 0, 8)
        harness.runner.allocator.free(slots)
        return batch, slots.to(harness.runner.device)


@pytest.fixture
def world(model: Path) -> World:
    return World(model)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_graph_starts_first(
    world: World, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then what is due, and the launch, on a stream that has seen what preceded the
    graph; the tail follows them and the graph."""
    harness = world.harness
    owner = harness.new_row(list(range(6)))
    harness.run(harness.prepare(EXTEND, [(owner, 6)]))
    harness.release(owner)
    # The harness asks for it; a worker does not.
    monkeypatch.setattr(world.manager, "settle", lambda: None)
    batch = world.prefill(*SHAPES[shape])
    world.log.clear()
    world.note(monkeypatch)
    harness.runner.forward(batch)
    waits = [] if ON_GPU else ["side waits for main"]
    ends = [] if ON_GPU else ["main waits for side"]
    assert world.log == [
        *waits,
        *("replay", "poison", "expect_rows", "before_model"),
        *waits,
        *("write_tail", *ends),
    ]


def test_an_eager_prefill_launches_before_its_model(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = world.prefill(20)
    world.harness.runner.prefill_graph_runner = None
    world.log.clear()
    world.note(monkeypatch)
    world.harness.runner.forward(batch)
    launches = [entry for entry in world.log if "waits" not in entry]
    assert launches == ["before_model", "write_tail"]


def test_a_launch_that_fills_new_slots_precedes_the_graph(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(model, real_data="all")
    batch = world.prefill(7)
    world.note(monkeypatch)
    world.harness.runner.forward(batch)
    launches = [entry for entry in world.log if "waits" not in entry]
    assert launches == ["before_model", "replay", "write_tail"]


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_found_in_sound_prefills(world: World, shape: str) -> None:
    for cached in (0, 6):
        batch = world.prefill(*SHAPES[shape], cached=cached)
        assert findings(world.harness, batch) == []
        row = int(batch.req_pool_indices[0])
        assert findings(world.harness, decode_batch(world.harness, row)) == []
    graphs = world.harness.runner.prefill_graph_runner
    assert isinstance(graphs, BreakableCudaGraphRunner)
    assert graphs.num_replays and not graphs.fallbacks


def test_what_was_freed_is_poisoned_before_it_is_read(world: World) -> None:
    batch, slots = world.freed_prefix()
    state = world.manager.target.buffers.state
    assert not (state.head[slots, 0] == POISON_WORD).any()
    found = findings(world.harness, batch)
    assert [f["position"] for f in found] == list(range(8))
    assert all("verify_freed" in f["reasons"] for f in found)


@pytest.mark.parametrize("word", range(4))
def test_a_damaged_prefix_is_found_in_the_forward_that_reads_it(
    world: World, word: int
) -> None:
    batch = world.prefill(7, cached=6)
    slot = int(world.harness.pool.row_slots(int(batch.req_pool_indices[0]), 3, 4)[0])
    world.manager.target.buffers.state.tail[slot, word] ^= 1 << 5
    found = findings(world.harness, batch)
    assert 3 in {f["position"] for f in found}


@pytest.mark.parametrize("injector", ["req_to_token", "early_free"])
def test_a_planted_fault_is_found(world: World, injector: str) -> None:
    """It is planted before the graph; the launch still follows the graph's start."""
    batch = world.prefill(7, cached=6)
    driver_of(world.manager).arm(injector, seed=1)
    assert findings(world.harness, batch)


def test_the_check_is_made_although_the_graph_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when attention fails over the damage itself."""
    batch, _ = world.freed_prefix()

    def fail(graph: BreakableGraph) -> None:
        raise KeyError("replay")

    monkeypatch.setattr(BreakableGraph, "replay", fail)
    with pytest.raises(KeyError, match="replay"):
        world.harness.runner.forward(batch)
    found = world.manager.drain(
        owner_of=lambda slot: Owner("unknown"), books=HostBooks()
    )
    assert len(found) == 8
    assert all("verify_freed" in violation.labels for violation in found)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
