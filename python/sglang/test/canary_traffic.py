"""Runs an engine until a planted fault is reported, for the canary's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kv_canary.reporter import CanaryViolation
from kv_canary.sweep import SweepRun
from sglang.faults.driver import ArmedFault
from sglang.srt.forward.batch import ForwardBatch
from sglang.srt.kv_canary.perturb import PerturbDriver, drivers_of
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
from sglang.srt.kv_canary.runner.sweep import Sweeper
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.test.harness import EngineHarness

VOCAB = 1000
CONTEXT = 512
WARM_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the requests of `plant`.

    Fields:
        shared: of the prefix that every third prompt begins with.
        own: of the rest of a prompt, at random in this range.
        generated: of an answer, at random in this range.
    """

    shared: int = 32
    own: range = range(32, 33)
    generated: range = range(8, 40)


LENGTHS = Lengths()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a forward according to the host's records.

    slots[:prefix_len] are read, the others written.
    """

    rid: str | None
    prefix_len: int
    slots: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Input of one forward. `swept` holds the slots of the preceding sweep pass."""

    clock: int
    is_decode: bool
    rows: list[Row]
    swept: list[int]

    def reads(self, slots: Collection[int]) -> bool:
        """Whether it, or the sweep before it, reads any of `slots`."""
        wanted = set(slots)
        prefixes = [row.slots[: row.prefix_len] for row in self.rows]
        return any(wanted.intersection(slots) for slots in (*prefixes, self.swept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that ended in a report.

    Fields:
        planted: the fault.
        violations: violations of the incident that stopped the engine, as JSON objects.
        forward: number of the forward that found it.
        text: error text of mode `raise`. asked, said: prompts, and tokens that clients
        had received, by request.
        rids: requests by serial.
        forwards: all launched forwards.
        cached: slots that the prefix cache held at the end.
    """

    planted: ArmedFault
    violations: list[dict[str, Any]]
    forward: int
    text: str
    asked: dict[str, list[int]]
    said: dict[str, list[int]]
    rids: dict[int, str]
    forwards: list[Forward]
    cached: int

    def since_planted(self) -> list[Forward]:
        return [f for f in self.forwards if f.clock >= self.planted.clock]


@dataclass(kw_only=True)
class ForwardLog:
    """Records the inputs of an engine's forwards, before a fault is planted in them."""

    manager: CanaryManager
    forwards: list[Forward] = field(default_factory=list)
    rids: dict[int, str] = field(default_factory=dict)

    def note(self, batch: ForwardBatch) -> None:
        pool, serials = self.manager.target.req_to_token_pool, self.manager.serials
        parts = zip(
            batch.req_pool_indices.tolist(),
            batch.req_serial.tolist(),
            batch.prefix_lens.tolist(),
            batch.extend_lens.tolist(),
            strict=True,
        )
        rows = []
        for row, serial, prefix, extend in parts:
            rid = serials.rid(serial) if row else None
            if rid is not None:
                self.rids[serial] = rid
            slots = pool.row_slots(row, 0, prefix + extend).tolist()
            rows.append(Row(rid=rid, prefix_len=prefix, slots=slots))
        self.forwards.append(
            Forward(
                clock=int(self.manager.target.buffers.state.clock),
                is_decode=batch.forward_mode.is_decode,
                rows=rows,
                swept=[],
            )
        )

    def note_sweep(self, runs: list[SweepRun]) -> list[SweepRun]:
        """Record a sweep pass, which runs inside of the last recorded forward."""
        self.forwards[-1].swept.extend(int(s) for run in runs for s in run.slots)
        return runs


@contextmanager
def logged(harness: EngineHarness) -> Iterator[ForwardLog]:
    """Log the forwards that `harness` launches within the context."""
    log = ForwardLog(manager=canary_of(harness))
    runner = harness.scheduler.worker.model_runner
    forward, next_runs = runner.forward, Sweeper.next_runs

    def noted(batch: ForwardBatch, **options: Any) -> LogitsProcessorOutput:
        log.note(batch)
        return forward(batch, **options)

    def swept(sweeper: Sweeper) -> list[SweepRun]:
        return log.note_sweep(next_runs(sweeper))

    with (
        patch.object(runner, "forward", noted),
        patch.object(Sweeper, "next_runs", swept),
    ):
        yield log


def canary_of(harness: EngineHarness) -> CanaryManager:
    return harness.scheduler.worker.canary_managers()[0]


def faults_of(harness: EngineHarness) -> PerturbDriver:
    """Return the driver that plants faults in the target's pool."""
    return drivers_of(harness.scheduler)[0]


class PlantTraffic:
    """Requests, a new one in every third step. Some prompts share a prefix, and
    finished requests leave theirs in the cache, so that every fault finds an
    opportunity.

    Attributes:
        asked: prompts by request.
    """

    def __init__(
        self, harness: EngineHarness, *, seed: int, lengths: Lengths, **options: Any
    ) -> None:
        self.asked: dict[str, list[int]] = {}
        self._harness = harness
        self._lengths = lengths
        self._options = options
        self._rng = random.Random(seed)
        self._shared = self._tokens(lengths.shared)
        self._prompts: list[list[int]] = []
        self._has_met = False

    def on_step(self, step: int) -> None:
        """Submit the request that is due before a step."""
        if step % 3 == 0:
            self._submit(step // 3)

    def meet(self, planted: Sequence[ArmedFault]) -> None:
        """Submit a request that meets the damage of a fault, once it can and if only
        such a request does."""
        if not planted or self._has_met:
            return
        damage = planted[0].damage
        live = {req.serial for req in self._harness.scheduler.unfinished}
        self._has_met = damage.serial not in live
        if self._has_met and damage.prompt is not None:
            self._ask("meets", damage.prompt, max_new_tokens=4)

    def _submit(self, i: int) -> None:
        rng, prompts = self._rng, self._prompts
        tail = self._tokens(_draw(rng, self._lengths.own))
        prompts.append([*(self._shared if i % 3 == 0 else ()), *tail])
        ids = prompts[-1]
        if i % 2 == 1 and i > 6:
            ids = prompts[rng.randrange(max(i - 12, 0), i - 3)] + tail[:2]
        self._ask(f"q{i}", ids, max_new_tokens=_draw(rng, self._lengths.generated))

    def _ask(self, rid: str, ids: list[int], *, max_new_tokens: int) -> None:
        self.asked[rid] = ids
        self._harness.submit(
            ids, rid=rid, stream=True, max_new_tokens=max_new_tokens, **self._options
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(count)]


def _draw(rng: random.Random, among: range) -> int:
    """Return one of `among`; a range of one draws nothing."""
    return among[0] if len(among) == 1 else rng.choice(among)


def plant(
    model: Path,
    name: str,
    *,
    seed: int,
    group: str = "full",
    lengths: Lengths = LENGTHS,
    prepare: Callable[[EngineHarness], None] = lambda harness: None,
    **server_args: Any,
) -> Outcome:
    """Serve mock requests in mode `raise`, plant the fault in `group`, run until it
    stops. `prepare` gets the engine before the first request."""
    defaults: dict[str, Any] = {
        "page_size": 1,
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "skip_tokenizer_init": True,
        "kv_canary": "raise",
        "kv_canary_real_data": "partial",
    }
    harness = EngineHarness(model, **(defaults | server_args))
    prepare(harness)
    manager, faults = canary_of(harness), faults_of(harness)
    traffic = PlantTraffic(harness, seed=seed, lengths=lengths)

    def run() -> str:
        for step in range(400):
            traffic.on_step(step)
            if step == WARM_STEPS:
                faults.arm(name, seed=seed, group=group)
            traffic.meet(faults.planted)
            try:
                harness.scheduler.step()
            except CanaryViolation as error:
                return str(error)
        planted = faults.planted
        raise AssertionError(f"{name}, seed {seed}: not reported; planted {planted}")

    with logged(harness) as log:
        text = run()
    incident = manager.reporter.incidents[-1]
    assert len(faults.planted) == 1, faults.planted
    answers = harness.collect()
    return Outcome(
        planted=faults.planted[0],
        violations=incident["violations"],
        forward=incident["forward"],
        text=text,
        asked=traffic.asked,
        said={rid: answer.output_ids for rid, answer in answers.items()},
        rids=log.rids,
        forwards=log.forwards,
        cached=len(harness.scheduler.cache.cached_slots()),
    )
